"""What a batch and its data look like, for people."""

from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from telamon.data.packing import Batch
from telamon.data.tokenizer import Tokenizer


def batch_table(batch: Batch, *, row: int, tokenizer: Tokenizer) -> Table:
    """One row of a batch, a line a place: text and id of the token, its target, mask, segment and position; documents apart by a rule."""
    table = Table("place", "token", "id", "target", "mask", "segment", "position")
    for column in (table.columns[0], *table.columns[2:]):
        column.justify = "right"
    one = {name: array[row] for name, array in batch.items()}
    for place, (token, target, mask, segment, position) in enumerate(
        zip(*(one[name].tolist() for name in ("tokens", "targets", "mask", "segments", "positions")), strict=True)
    ):
        last = place + 1 == len(one["segments"]) or one["segments"][place + 1] != segment
        shown = f"{target} {_text(tokenizer, target)}" if mask else "·"
        text = _text(tokenizer, token) if segment else ""
        table.add_row(str(place), Text(text), str(token), Text(shown), f"{mask:g}", str(segment), str(position), end_section=last)
    return table


def segment_table(batch: Batch, *, row: int) -> Table:
    """The documents of a row: places, number of tokens and first and last id of each."""
    table = Table("segment", "places", "tokens", "trained", "first id", "last id")
    for column in table.columns:
        column.justify = "right"
    segments = batch["segments"][row]
    for segment in np.unique(segments[segments > 0]).tolist():
        at = np.flatnonzero(segments == segment)
        ids = batch["tokens"][row][at]
        trained = int(batch["mask"][row][at].sum())
        table.add_row(str(segment), f"{at[0]}-{at[-1]}", str(len(at)), str(trained), str(ids[0]), str(ids[-1]))
    return table


def report_table(report: dict[str, Any]) -> Table:
    """A loader's report: a line a figure, a column a source."""
    sources = report["sources"]
    table = Table("", *(escape(source["name"]) for source in sources))
    for column in table.columns[1:]:
        column.justify = "right"
    for name in (name for name in sources[0] if name not in ("name", "epoch")):
        table.add_row(name.replace("_", " "), *(_figure(source[name]) for source in sources))
    for name in sources[0]["epoch"]:
        table.add_row(f"{name} in an epoch", *(_figure(source["epoch"][name]) for source in sources))
    return table


def _figure(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4%}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _text(tokenizer: Tokenizer, token: int) -> str:
    """The token's text with its spaces visible, or its name where it stands for no text."""
    text = tokenizer.decode([token])
    return repr(text) if text or tokenizer.token_bytes[token] else tokenizer.name(token)
