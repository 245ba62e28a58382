"""From prompts to text: BOS, stop strings, and text that can be shown while it grows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from telamon.errors import ConfigError
from telamon.infer.engine import Finish, Generator
from telamon.infer.sampling import Sampling


class Codec(Protocol):
    """What is asked of a tokenizer (see `telamon.data.tokenizer`)."""

    @property
    def bos_id(self) -> int | None:
        """Begins a document."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without BOS or EOS."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        ...


@dataclass(frozen=True)
class Completion:
    """A prompt's continuation."""

    prompt: str
    text: str
    """The continuation alone, cut before a stop string."""
    tokens: tuple[int, ...]
    """Ids drawn, without EOS; with a stop string, up to the one that completed it."""
    finish: Finish
    """eos: the model ended the document; stop: a stop string came; length: max_tokens were drawn."""


def complete(
    generator: Generator,
    tokenizer: Codec,
    prompts: Sequence[str],
    *,
    max_tokens: int,
    sampling: Sampling,
    stop: Sequence[str] = (),
    seed: int = 0,
    context: int | None = None,
    on_text: Callable[[int, str], None] | None = None,
) -> list[Completion]:
    """Continue prompts, each begun with BOS as training documents are.

    Args:
        generator: the model.
        tokenizer: the model's.
        prompts: at least one; each alone gives the same text as in a batch.
        max_tokens: most tokens a prompt gets.
        sampling: how tokens are drawn.
        stop: strings that end a continuation where one is complete, across token borders too.
        seed: the same seed gives the same text.
        context: most tokens a prompt and its continuation may have together.
        on_text: called with a prompt's number and each piece of its text that no later token can change.

    Raises:
        ConfigError: a prompt is empty where there is no BOS, or not text, or it does not fit the context.
    """
    if not prompts:
        raise ConfigError("there is no prompt to continue; give at least one")
    if max_tokens < 1:
        raise ConfigError(f"max_tokens={max_tokens} is not possible; give 1 or more")
    if "" in stop:
        raise ConfigError("an empty stop string would end every text at once; leave it out")
    encoded = [_encode(tokenizer, number, prompt, max_tokens, context) for number, prompt in enumerate(prompts, 1)]
    completions = complete_ids(
        generator, tokenizer, encoded, max_tokens=max_tokens, sampling=sampling, stop=stop, seed=seed, on_text=on_text
    )
    return [replace(completion, prompt=prompt) for completion, prompt in zip(completions, prompts, strict=True)]


def complete_ids(
    generator: Generator,
    tokenizer: Codec,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    sampling: Sampling,
    stop: Sequence[str] = (),
    seed: int = 0,
    on_text: Callable[[int, str], None] | None = None,
) -> list[Completion]:
    """Continue prompts that are ids already, none of them empty; see `complete`."""
    rows = [_Row(tokenizer, ids, tuple(stop)) for ids in prompts]
    session = generator.start(prompts, max_tokens=max_tokens, sampling=sampling, seed=seed)
    while session.running:
        going = [number for number, finish in enumerate(session.finish) if finish is None]
        session.advance()
        for number in going:
            row = rows[number]
            keep = row.take(session.tokens[number], ended=session.finish[number] is not None)
            if keep is not None:
                session.stop(number, keep=keep)
            if on_text and (piece := row.fresh()):
                on_text(number, piece)
    ended = zip(rows, session.tokens, session.finish, strict=True)
    return [Completion(row.prompt_text, row.text, tuple(tokens), finish or "length") for row, tokens, finish in ended]


def _encode(tokenizer: Codec, number: int, prompt: str, max_tokens: int, context: int | None) -> list[int]:
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"prompt {number} is not valid UTF-8 text (character {error.start + 1})") from error
    ids = [*([] if tokenizer.bos_id is None else [tokenizer.bos_id]), *tokenizer.encode(prompt)]
    if not ids:
        raise ConfigError(f"prompt {number} is empty, and this model has no token that begins a document; give it some text")
    if context is not None and len(ids) + max_tokens > context:
        room = context - len(ids)
        way_out = f"--max-tokens can be at most {room}" if room > 0 else f"shorten it to fewer than {context} tokens"
        raise ConfigError(
            f"prompt {number} has {len(ids)} tokens, and {max_tokens} more do not fit the {context} tokens the model was trained on; {way_out}"
        )
    return ids


class _Row:
    """The text of one row as it grows."""

    def __init__(self, tokenizer: Codec, prompt: Sequence[int], stop: tuple[str, ...]):
        self._tokenizer, self._prompt, self._stop = tokenizer, list(prompt), stop
        self.prompt_text = tokenizer.decode(self._prompt)
        self._seen = 0
        self._safe = 0
        self._shown = 0
        self.text = ""

    def take(self, tokens: Sequence[int], *, ended: bool) -> int | None:
        """All tokens drawn so far. Gives how many of them complete a stop string; none: no stop string came."""
        before, self._seen = self._seen, len(tokens)
        self.text = self._decode(tokens)
        if any(stop in self.text for stop in self._stop):
            for count in range(before + 1, len(tokens) + 1):
                text = self._decode(tokens[:count])
                found = [place for stop in self._stop if (place := text.find(stop)) >= 0]
                if found:
                    self.text = text[: min(found)]
                    self._safe = len(self.text)
                    return count
        self._safe = len(self.text) if ended else self._settled()
        return None

    def fresh(self) -> str:
        """Text that is settled and was not given out yet."""
        piece = self.text[self._shown : self._safe]
        self._shown = max(self._shown, self._safe)
        return piece

    def _decode(self, tokens: Sequence[int]) -> str:
        # Together with the prompt: some tokenizers drop the space before the first word they decode.
        return self._tokenizer.decode([*self._prompt, *tokens])[len(self.prompt_text) :]

    def _settled(self) -> int:
        """Length of the text that stays: without a character whose bytes are not all there, or the beginning of a stop string."""
        end = len(self.text.rstrip("\ufffd"))
        for stop in self._stop:
            for length in range(min(len(stop) - 1, end), 0, -1):
                if self.text.endswith(stop[:length], 0, end):
                    end -= length
                    break
        return end
