"""Encoding by remembering words: the same ids as the tokenizer's own, several times faster on one core.

A byte-level tokenizer with GPT-2's rule cuts a text into words and merges within each alone. Source code and prose use the same words again and
again, so a dictionary from word to ids replaces most of the work. Python's regular expressions know no `\\p{L}`, so only ASCII is cut here; lines
with other characters go to the tokenizer as they are, as if each were one word.
"""

import re
from collections.abc import Callable, Sequence
from itertools import groupby, islice

import numpy as np

_WORD = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", re.ASCII)
"""GPT-2's rule (its published encoder.py), for ASCII text."""

_LINE = re.compile(r"(?<=[!-~])(?=\n)")
"""Between the last visible character of a line and its newline a new word begins, whatever comes before or after."""

_MOST_WORDS = 1 << 20
_MOST_CHARACTERS = 1 << 26


def cuts_like_gpt2(layout: dict) -> bool:
    """Whether a tokenizer.json cuts text by GPT-2's rule and nothing else, so that its ids are the ids of the words in turn."""
    cutter, model = layout["pre_tokenizer"] or {}, layout["model"]
    return (
        layout["normalizer"] is None
        and cutter.get("type") == "ByteLevel"
        and cutter.get("use_regex", True)
        and not cutter["add_prefix_space"]
        and model.get("type") == "BPE"
        and not model.get("dropout")
        and all(token["special"] for token in layout["added_tokens"])
    )


class WordMemo:
    """Ids of words seen so far, end to end in one array. It is emptied when it grows beyond a bound."""

    def __init__(self, encode: Callable[[Sequence[str]], list[list[int]]]):
        self._encode = encode
        self._forget()

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of several texts end to end, u32[ids], and how many each has, i64[texts]."""
        if len(self._number) > _MOST_WORDS or self._characters > _MOST_CHARACTERS:
            self._forget()
        words = [_words(text) for text in texts]
        lookup = self._number.__getitem__
        numbers = np.concatenate([np.zeros(0, np.int64), *(np.fromiter(map(lookup, w), np.int64, len(w)) for w in words)])
        self._learn()
        counts = np.diff(self._first)[numbers]
        ends = np.cumsum(counts)
        ids = self._ids[np.repeat(self._first[numbers] - (ends - counts), counts) + np.arange(ends[-1] if len(ends) else 0)]
        text_ends = np.concatenate([[0], ends])[np.cumsum([len(w) for w in words], dtype=np.int64)]
        return ids, np.diff(text_ends, prepend=0)

    def _forget(self) -> None:
        self._number, self._characters = _Numbers(), 0
        self._ids, self._first = np.zeros(0, np.uint32), np.zeros(1, np.int64)

    def _learn(self) -> None:
        """Encode the words that were numbered since the last time."""
        fresh = list(islice(self._number, len(self._first) - 1, None))
        encoded = self._encode(fresh)
        self._characters += sum(map(len, fresh))
        ends = self._first[-1] + np.cumsum([len(ids) for ids in encoded], dtype=np.int64)
        self._first = np.concatenate([self._first, ends])
        self._ids = np.concatenate([self._ids, *(np.array(ids, np.uint32) for ids in encoded)])


class _Numbers(dict[str, int]):
    """Words numbered in the order of their first look-up."""

    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        return number


def _words(text: str) -> list[str]:
    """The text in words; a run of lines that are not ASCII is one."""
    if text.isascii():
        return _WORD.findall(text)
    words: list[str] = []
    for ascii_only, lines in groupby(_LINE.split(text), str.isascii):
        run = "".join(lines)
        words.extend(_WORD.findall(run) if ascii_only else [run])
    return words
