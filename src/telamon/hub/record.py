"""hf.json of a run: where an imported model came from, and what an export of it needs beside the config and the weights."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from telamon.errors import DataError
from telamon.infer.run import HF_RECORD
from telamon.watch.files import join, read_text

_CARRIED = ("bos_token_id", "eos_token_id", "pad_token_id")


def token_ids(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a config.json says of special tokens; a model with a text model within it may say it there."""
    text = config.get("text_config")
    said = {**(text if isinstance(text, Mapping) else {}), **config}
    return {name: said[name] for name in _CARRIED if name in said}


@dataclass(frozen=True)
class HfRecord:
    """What an import writes down."""

    origin: str
    """A folder, a file, or `organisation/name@commit`."""
    config: dict[str, Any]
    """The source's config.json."""
    generation_config: dict[str, Any] | None = None
    """The source's generation_config.json."""
    dtypes: dict[str, str] = field(default_factory=dict)
    """Types of tensors that are stored in a wider one, because other layers of their weight have it."""
    copies: dict[str, str] = field(default_factory=dict)
    """Tensor of the source that repeats another one -> that one."""

    def write(self, folder: Path) -> None:
        """Write the file into a run's folder."""
        (folder / HF_RECORD).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, run: str) -> Self | None:
        """The record of a run, or none where it was not imported. Raises DataError where it is damaged."""
        text = read_text(join(run, HF_RECORD))
        try:
            return None if text is None else cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise DataError(f"{join(run, HF_RECORD)} is damaged: {error}; import the model again") from error
