"""text.json of a run: by their hashes, the tokenizer and the chat template that its weights were trained with.

Weights mean nothing to another tokenizer, even one of the same size, and less to another template; neither shows as an error.
"""

import json
from dataclasses import asdict, dataclass
from typing import Self

from telamon.data.chat_template import ChatTemplate
from telamon.data.tokenizer import Tokenizer
from telamon.errors import ConfigError, DataError
from telamon.watch.files import join, read_text, write_text

FILE_NAME = "text.json"


@dataclass(frozen=True)
class TextRecord:
    """What turns text into a run's ids."""

    tokenizer: str
    chat_template: str | None = None
    """None: there was none, and any may be used."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, template: ChatTemplate | None) -> Self:
        """The record of these two."""
        return cls(tokenizer.hash, None if template is None else template.hash)

    @classmethod
    def read(cls, run: str) -> Self | None:
        """The record of a run; none in a run of an earlier version. Raises DataError where it is damaged."""
        text = read_text(join(run, FILE_NAME))
        try:
            return None if text is None else cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise DataError(f"{join(run, FILE_NAME)} is damaged: {error}; remove it to go without its check") from error

    def write(self, run: str) -> None:
        """Write it into a run."""
        write_text(join(run, FILE_NAME), json.dumps(asdict(self), indent=1) + "\n")

    def check(self, used: "TextRecord", *, run: str, way_out: str) -> None:
        """Raise ConfigError, with both hashes, where what is to be used is not what this run was trained with."""
        for what, ours, theirs in (
            ("tokenizer", self.tokenizer, used.tokenizer),
            ("chat template", self.chat_template, used.chat_template),
        ):
            if ours is not None and ours != theirs:
                raise ConfigError(
                    f"{run} was trained with another {what}: its hash is {ours}, and that of the one in use {theirs or '(there is none)'}; {way_out}"
                )
