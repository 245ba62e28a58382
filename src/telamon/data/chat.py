"""Conversations as token ids: rendered by a template, tokenised once as one text, and with the assistant's part known.

Special tokens that the *template* writes become their ids. What a message spells is only text, so that nobody can end a turn, or open one, by
writing `<|im_end|>`: this differs from transformers, which sees no difference between the two.

Nothing is added to what the template writes: BOS is there once if it writes it, whatever the tokenizer adds to plain texts.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from telamon.data.chat_template import CLOSE, LETTERS, OPEN, SPECIAL, ChatTemplate, Message, unmarked
from telamon.data.tokenizer import TextTokenizer
from telamon.errors import ConfigError, DataError

_ASSISTANT = "assistant"


@dataclass(frozen=True)
class Conversation:
    """A conversation to learn from."""

    text: str
    """As rendered."""
    ids: np.ndarray
    """i32[tokens]."""
    offsets: np.ndarray
    """i64[tokens, 2]: characters of `text` that each token stands for, from and up to."""
    turns: np.ndarray
    """i32[tokens]: which assistant turn wrote a token, from 1; 0: it is given, such as the header that opens a turn."""

    @property
    def mask(self) -> np.ndarray:
        """bool[tokens]: tokens that the assistant wrote, a turn's end included."""
        return self.turns > 0


class ChatEncoder:
    """A template with the tokenizer it is for.

    Raises ConfigError where the template is none, or the tokenizer's special tokens cannot be told apart from text.
    """

    def __init__(self, tokenizer: TextTokenizer, template: ChatTemplate):
        template.check()
        self.tokenizer, self.template = tokenizer, template
        layout = json.loads(tokenizer.to_json())
        specials = {token["content"]: token["id"] for token in layout["added_tokens"] if token["special"]}
        longest_first = sorted(map(re.escape, specials), key=len, reverse=True)
        self._spelling = re.compile(f"(?:{'|'.join(longest_first)})(?!{LETTERS})" if specials else r"(?!)")
        self._inner = _marked_tokenizer(layout, specials)

    def prompt(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, **variables: Any) -> list[int]:
        """Ids of a conversation and of the header that opens the assistant's next turn.

        Raises:
            DataError: the template refuses the conversation.
        """
        marked = self._render(messages, tools, add_generation_prompt=True, **variables)
        return self._encode(_without_blocks(marked)[0]).ids

    def conversation(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, **variables: Any
    ) -> Conversation:
        """Ids of a whole conversation, and what of it the assistant wrote.

        That is what the template puts into `{% generation %}` blocks. Of a template without them, an assistant turn is what comes after the
        header that a prompt would end with, up to and with its end-of-turn token. A token is the assistant's if it *starts* in such a span: one
        that straddles the span's beginning was begun by the prompt, one that straddles its end by the assistant.

        Raises:
            DataError: the template refuses the conversation, or renders an earlier turn otherwise once later ones follow, and has no
                `{% generation %}` blocks.
        """
        marked = self._render(messages, tools, **variables)
        if self.template.marks_generation:
            marked, spans = _without_blocks(marked)
        else:
            spans = self._spans(marked, messages, tools, **variables)
        encoded = self._encode(marked)
        is_mark = np.frombuffer(marked.encode("utf-32-le"), np.uint32) == ord(SPECIAL)
        before = np.concatenate([[0], np.cumsum(is_mark)])  # marks, which are not part of the text
        begins, ends = np.array(encoded.offsets, np.int64).reshape(-1, 2).T
        turns = np.zeros(len(encoded.ids), np.int32)
        for number, (first, last) in enumerate(spans, 1):
            turns[(begins >= first) & (begins < last)] = number
        return Conversation(
            unmarked(marked), np.array(encoded.ids, np.int32), np.stack([begins - before[begins], ends - before[ends]], axis=1), turns
        )

    @cached_property
    def end_of_turn(self) -> int | None:
        """The special token that ends an assistant's turn; none where the template writes none, or cannot be asked."""
        try:
            last = self.conversation([{"role": "user", "content": "x"}, {"role": _ASSISTANT, "content": "x"}])
        except DataError:
            return None
        written = np.flatnonzero(last.mask)
        if not len(written):  # a template that leaves out what the assistant says
            return None
        after = last.ids[written[-1] :][:2]  # a block may end before the token that ends the turn
        return next((int(token) for token in after if self.tokenizer.token_bytes[token] == 0), None)

    def _render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, **variables: Any) -> str:
        """The marked text: special tokens of the template behind a mark, those that messages spell without."""
        rendered = self.template.render_marked(
            self._protected(messages), tools=None if tools is None else self._protected(tools), **self._protected(variables)
        )
        return self._spelling.sub(lambda found: SPECIAL + found[0], rendered).replace(LETTERS, "")

    def _protected(self, value: Any) -> Any:
        """The value with a mark behind every letter of the special tokens that its texts spell: however a template cuts them, none comes out."""
        if isinstance(value, str):
            if (odd := re.search("[\ud800-\udfff]", value)) is not None:  # how Python keeps bytes that are not UTF-8
                raise DataError(f"a message is not UTF-8 text (character {odd.start() + 1:,}); convert it first: {value[:60]!r}")
            if not value.isascii() and unmarked(value) != value:
                raise DataError(f"a message holds one of the characters U+FDD0 to U+FDD3, which Unicode keeps out of texts: {value[:60]!r}")
            return self._spelling.sub(lambda found: "".join(letter + LETTERS for letter in found[0]), value)
        if isinstance(value, Mapping):
            return {self._protected(key): self._protected(item) for key, item in value.items()}
        return [self._protected(item) for item in value] if isinstance(value, list | tuple) else value

    def _spans(
        self, whole: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, **variables: Any
    ) -> list[tuple[int, int]]:
        """Where in the marked text the assistant's turns are, from what the template makes of the conversation's beginnings."""
        spans = []
        for number, message in enumerate(messages):
            if message.get("role") != _ASSISTANT:
                continue
            header = self._render(messages[:number], tools, add_generation_prompt=True, **variables)
            turn = self._render(messages[: number + 1], tools, **variables)
            if not (whole.startswith(turn) and turn.startswith(header)):
                raise DataError(
                    f"{self.template.origin} renders message {number + 1} otherwise when it is the last one, so that what the assistant wrote "
                    "cannot be found in the text; put {% generation %} and {% endgeneration %} around it in the template"
                )
            spans.append((len(header), _end_of_turn(turn, len(header), self._spelling)))
        return spans

    def _encode(self, marked: str) -> Any:
        return self._inner.encode(marked, add_special_tokens=False)


def _end_of_turn(turn: str, begin: int, spelling: re.Pattern[str]) -> int:
    """Where the assistant stops: with the last special token, if only space follows it, which the model never writes."""
    specials = [found for found in spelling.finditer(turn, begin) if turn[found.start() - 1] == SPECIAL]
    if specials and not turn[specials[-1].end() :].strip():
        return specials[-1].end()
    return len(turn)


def _without_blocks(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without the marks around blocks, and where the blocks were."""
    text, spans, begin = "", [], 0
    for part in re.split(f"([{OPEN}{CLOSE}])", marked):
        if part == OPEN:
            begin = len(text)
        elif part == CLOSE:
            spans.append((begin, len(text)))
        else:
            text += part
    return text, spans


def _marked_tokenizer(layout: dict[str, Any], specials: Mapping[str, int]) -> Any:
    """The tokenizer with a mark in front of its special tokens' spelling: one text can then hold such tokens, and letters that look like them."""
    import tokenizers as hf

    renamed = {content: SPECIAL + content for content in specials}
    layout["added_tokens"] = [{**token, "content": renamed.get(token["content"], token["content"])} for token in layout["added_tokens"]]
    model = layout["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {renamed.get(token, token): index for token, index in vocab.items()}
    else:
        model["vocab"] = [[renamed.get(token, token), *score] for token, *score in vocab]
    if model.get("unk_token") in renamed:
        model["unk_token"] = renamed[model["unk_token"]]
    layout["post_processor"] = None  # it adds BOS and EOS to plain texts, and takes the space from a token's offsets
    try:
        inner = hf.Tokenizer.from_str(json.dumps(layout))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"this tokenizer cannot be used for chats: {error}") from error
    other = [content for content, index in specials.items() if inner.token_to_id(renamed[content]) != index]
    if other:
        raise ConfigError(
            f"this tokenizer cannot be used for chats: its special tokens {', '.join(other[:5])} cannot be told apart from text"
        )
    return inner
