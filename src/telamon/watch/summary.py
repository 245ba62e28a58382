"""`summary.json`: a run in a few figures, for programs that compare runs."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from telamon.watch.files import join, read_text, write_text

SUMMARY = "summary.json"


@dataclass(frozen=True)
class Summary:
    """The outcome of a run; a figure that was not measured is none."""

    steps: int
    """Optimizer steps done."""
    final_loss: float | None
    """Training loss of the last step, nats/token."""
    val_bits_per_byte: float | None
    """Last validation, bits per byte of held-out text."""
    gzip_bits_per_byte: float | None
    """What `gzip -9` needs for the same held-out files, bits per byte."""
    seconds_to_beat_gzip: float | None
    """Wall time from the process's start to the first validation below gzip's, s; none: not (yet) below."""
    wall_seconds: float
    """Wall time of the process, s."""
    tokens_per_second: float | None
    """Trained tokens per second after the first step, over all devices."""
    mfu: float | None
    """Share of the devices' peak; none where the peak is unknown."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further figures, written beside the ones above."""


def write_summary(run_dir: str | os.PathLike[str], summary: Summary) -> None:
    """Write `summary.json` as one atomic replacement."""
    figures = asdict(summary)
    figures |= figures.pop("extra")
    plain = {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in figures.items()}
    write_text(join(run_dir, SUMMARY), json.dumps(plain, indent=2, allow_nan=False) + "\n")


def summarised_steps(run_dir: str | os.PathLike[str]) -> int | None:
    """Steps of the run that its `summary.json` is about; none: it has no summary."""
    text = read_text(join(run_dir, SUMMARY))
    return None if text is None else json.loads(text)["steps"]
