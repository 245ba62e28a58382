"""Stop strings, text that streams, and what a prompt may be, with a scripted engine in the model's place."""

from typing import Any

import pytest

from telamon.errors import ConfigError
from telamon.infer.sampling import Sampling
from telamon.infer.text import complete


class Bytes:
    """Ids 0 to 255 are bytes, then BOS, EOS, and words of several bytes, so that stop strings lie across token borders."""

    bos_id, eos_id = 256, 257

    def __init__(self, *words):
        self.words = words

    def encode(self, text):
        return list(text.encode())

    def spell(self, text):
        """Ids of a text with the words used where they fit."""
        ids = []
        while text:
            word = next((w for w in self.words if text.startswith(w)), None)
            ids += [258 + self.words.index(word)] if word else list(text[0].encode())
            text = text[len(word or text[0]) :]
        return ids

    def decode(self, ids):
        parts = [bytes([i]) if i < 256 else self.words[i - 258].encode() if i > 257 else b"" for i in ids]
        return b"".join(parts).decode(errors="replace")


class Script:
    """An engine that draws given ids, a number at a time."""

    def __init__(self, rows, chunk):
        self.rows, self.chunk = rows, chunk
        self.prompts = None

    def start(self, prompts, *, max_tokens, sampling, seed):
        self.prompts = prompts
        self.tokens = [[] for _ in self.rows]
        self.finish: list[str | None] = [None] * len(self.rows)
        self.max_tokens = max_tokens
        return self

    @property
    def running(self):
        return None in self.finish

    def stop(self, row, *, keep):
        self.finish[row] = "stop"
        del self.tokens[row][keep:]

    def advance(self):
        for row, ids in enumerate(self.rows):
            if self.finish[row] is None:
                done = len(self.tokens[row])
                self.tokens[row] += ids[done : min(done + self.chunk, self.max_tokens)]
                if len(self.tokens[row]) == self.max_tokens:
                    self.finish[row] = "length"
                elif len(self.tokens[row]) == len(ids):
                    self.finish[row] = "eos"


GREEDY = Sampling(temperature=0)


def run(texts, tokenizer, *, chunk=4, max_tokens=1000, stop=(), on_text=None, prompts=None):
    script: Any = Script([tokenizer.spell(text) for text in texts], chunk)
    prompts = prompts or ["p"] * len(texts)
    return complete(script, tokenizer, prompts, max_tokens=max_tokens, sampling=GREEDY, stop=stop, on_text=on_text)


CHUNKS = pytest.mark.parametrize("chunk", [1, 2, 3, 7, 50])


@CHUNKS
def test_text_is_cut_before_a_stop_string_that_lies_across_tokens(chunk):
    tokenizer = Bytes("x = 1\n", "\nde", "f ")
    (completion,) = run(["x = 1\n\ndef f(): pass"], tokenizer, chunk=chunk, stop=["\n\ndef"])
    assert completion.text == "x = 1"
    assert completion.finish == "stop"
    assert tokenizer.decode(completion.tokens) == "x = 1\n\ndef "


@CHUNKS
def test_the_stop_string_that_is_complete_first_counts(chunk):
    """Not the one that begins first: whether more tokens were drawn before looking must not matter."""
    (completion,) = run(["abc and more"], Bytes(), chunk=chunk, stop=["abc", "b"])
    assert completion.text == "a"


@CHUNKS
def test_each_row_ends_for_its_own_reason(chunk):
    completions = run(["one;two", "three", "a long one"], Bytes(), chunk=chunk, stop=[";"], max_tokens=8)
    assert [(c.text, c.finish) for c in completions] == [("one", "stop"), ("three", "eos"), ("a long o", "length")]


@CHUNKS
def test_pieces_add_up_to_the_text_and_are_never_taken_back(chunk):
    """Neither half a character nor the beginning of a stop string is shown before it is known how it goes on."""
    pieces = []
    (completion,) = run(["été 日本 EN, END it"], Bytes("本 E"), chunk=chunk, stop=["END"], on_text=lambda row, text: pieces.append(text))
    assert "".join(pieces) == completion.text == "été 日本 EN, "
    assert "\ufffd" not in "".join(pieces)


def test_a_beginning_of_a_stop_string_is_shown_when_the_text_ends_there():
    pieces = []
    (completion,) = run(["to the EN"], Bytes(), stop=["END"], on_text=lambda row, text: pieces.append(text))
    assert "".join(pieces) == completion.text == "to the EN"


def test_a_stop_string_in_the_prompt_does_not_count():
    (completion,) = run(["xyz"], Bytes(), stop=[";x"], prompts=["a;"])
    assert completion.text == "xyz"


def test_prompts_begin_with_bos():
    script: Any = Script([[65]], 4)
    complete(script, Bytes(), ["hi"], max_tokens=1, sampling=GREEDY)
    assert script.prompts == [[256, *b"hi"]]


def test_an_empty_prompt_is_a_document_from_its_beginning():
    script: Any = Script([[65]], 4)
    assert complete(script, Bytes(), [""], max_tokens=1, sampling=GREEDY)[0].text == "A"
    assert script.prompts == [[256]]


class NoBos(Bytes):
    bos_id = None


@pytest.mark.parametrize(
    ("tokenizer", "arguments", "message"),
    [
        (Bytes(), {"prompts": []}, "no prompt"),
        (Bytes(), {"prompts": ["ok", "\udcff"]}, "prompt 2 is not valid UTF-8"),
        (NoBos(), {"prompts": [""]}, "prompt 1 is empty"),
        (Bytes(), {"max_tokens": 0}, "max_tokens=0"),
        (Bytes(), {"stop": ["x", ""]}, "empty stop string"),
        (Bytes(), {"prompts": ["ok", "x" * 60], "context": 64}, "prompt 2 has 61 tokens.*10 more.*64 tokens.*at most 3"),
        (Bytes(), {"prompts": ["x" * 100], "context": 64}, "prompt 1 has 101 tokens.*fewer than 64"),
    ],
)
def test_what_cannot_be_continued_is_refused(tokenizer, arguments, message):
    given = {"prompts": ["p"], "max_tokens": 10} | arguments
    prompts = given.pop("prompts")
    script: Any = Script([[65]], 4)
    with pytest.raises(ConfigError, match=message):
        complete(script, tokenizer, prompts, sampling=GREEDY, **given)
