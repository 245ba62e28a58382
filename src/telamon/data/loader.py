"""From a run config to batches. The batch of a step is a pure function of the seed, the step and the data's hash.

Nothing is saved but the step: a loader opened by another process, on another number of hosts, gives the same global batch for it, and each process takes its
own contiguous block of rows. Grain reads ahead on top (`batches`): element k of its dataset is the block of step k, since a batch made in
one go costs a fraction of one stacked from rows, and batch sizes may change between steps.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from telamon.config.schema import RunConfig
from telamon.data.corpus import Corpus, open_corpus
from telamon.data.mixing import mixture
from telamon.data.order import Order
from telamon.data.packing import Batch, Spans, Stream, assemble, lay_out
from telamon.data.tokenizer import Tokenizer
from telamon.errors import ConfigError, OutOfDataError

Position = dict[str, Any]
"""Small values that JSON can hold; one for the whole run, the same on every process."""


class Loader(Protocol):
    """What the training loop asks of data. A stream would keep its state in the position; the arithmetic loader only checks it."""

    data_hash: str
    tokenizer: Tokenizer

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """This process's blocks of steps start .. stop-1, read ahead."""
        ...

    def eval_batches(self, batch_size: int) -> Iterable[Batch]:
        """This process's blocks of the held-out set, each token once."""
        ...

    def position(self, step: int | None = None) -> Position:
        """Where the data stand before `step` (none: after the last batch handed out)."""
        ...

    def restore(self, position: Position) -> None:
        """Go on from a position. Raises ConfigError where the data or their layout are not those it was taken from."""
        ...

    def report(self) -> dict[str, Any]:
        """What the data are, for people and for data.json."""
        ...


def open_loader(cfg: RunConfig, *, process_index: int = 0, process_count: int = 1) -> "ArithmeticLoader":
    """Open the data of a run: read the sources, on first use train the tokenizer and tokenise, lay the documents out.

    Raises DataError (missing, bad or empty data) and ConfigError (a batch that the processes can't share, a tokenizer that doesn't fit).
    """
    return ArithmeticLoader(cfg, open_corpus(cfg), process_index=process_index, process_count=process_count)


class ArithmeticLoader:
    """Random access to the batch of any step."""

    def __init__(self, cfg: RunConfig, corpus: Corpus, *, process_index: int = 0, process_count: int = 1):
        self.corpus, self.tokenizer = corpus, corpus.tokenizer
        self._cfg, self._process, self._processes = cfg, process_index, process_count
        self._next_step = 0
        self.data_hash = self._hash_data()
        self._mixture = mixture(tuple(s.weight for s in cfg.data.sources))
        self._layouts = [
            lay_out(
                part.training,
                packing=cfg.data.packing,
                width=cfg.train.seq_len,
                max_segments=cfg.data.max_segments,
                order=Order(cfg.train.seed, index, cfg.data.shuffle),
            )
            for index, part in enumerate(corpus.parts)
        ]
        for size in {cfg.train.batch_size, *(stage.batch_size for stage in cfg.train.batch_ramp)}:
            self._block(size, "train.batch_size")

    @cached_property
    def rows_available(self) -> int | None:
        """Rows before a source has been seen `data.epochs` times; None without that limit."""
        if self._cfg.data.epochs is None:
            return None
        return self._mixture.rows_until(np.array([layout.rows(self._cfg.data.epochs) for layout in self._layouts]))

    def batch_at(self, step: int) -> Batch:
        """This process's rows of a step, [rows, T] each. The last step before the data are exhausted may end in empty rows.

        Raises OutOfDataError when `data.epochs` leave no row for the step.
        """
        train = self._cfg.train
        first, size = train.rows_before(step), train.batch_size_at(step)
        available = self.rows_available
        if available is not None and first >= available:
            raise OutOfDataError(
                f"out of data at step {step}: data.epochs={self._cfg.data.epochs} gives {available} rows of {train.seq_len} tokens, and the "
                f"{step} steps before it took {first}; raise data.epochs (null: no limit) or lower train.steps"
            )
        return self._rows(first, self._block(size, "train.batch_size"), available)

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """Blocks of steps start .. stop-1, read ahead by `data.prefetch` batches: what `next` takes is the wait for data."""
        import grain

        steps = grain.MapDataset.range(start, stop).map(self.batch_at)
        ahead = self._cfg.data.prefetch
        ready = iter(steps.to_iter_dataset(grain.ReadOptions(num_threads=min(2, ahead), prefetch_buffer_size=ahead)))
        for step in range(start, stop):
            batch = next(ready)
            self._next_step = step + 1
            yield batch

    def eval_batches(self, batch_size: int) -> Iterator[Batch]:
        """The held-out documents of every source, end to end: each token once, as many batches on every process, empty rows at the end.

        `batch_size` counts rows over all processes. Nothing is yielded where nothing is held out.
        """
        block = self._block(batch_size, "eval.batch_size")
        width = self._cfg.train.seq_len
        streams = [(p, Stream(p.held_out, width=width, order=Order(shuffle=False))) for p in self.corpus.parts if len(p.held_out.length)]
        for part, stream in streams:
            rows = stream.rows(1)
            for first in range(0, rows, batch_size):
                begin, end = (min(first + edge, rows) for edge in (block.start, block.stop))
                spans = stream.spans(begin, end, epochs=1) if begin < end else Spans.none()
                yield assemble(spans, part.held_out, part.store.tokens, rows=len(block), width=width)

    @property
    def held_out_bytes(self) -> int:
        """Bytes of held-out text."""
        return self.corpus.held_out_bytes

    def gzip_bits_per_byte(self) -> float | None:
        """What `gzip -9` needs for the held-out text; None where there is none."""
        return self.corpus.gzip_bits_per_byte

    def position(self, step: int | None = None) -> Position:
        """See :class:`Loader`."""
        at = self._next_step if step is None else step
        return {"step": at, "rows": self._cfg.train.rows_before(at), **self._identity}

    def restore(self, position: Position) -> None:
        """Check that going on from `position` trains no row twice and skips none. Raises ConfigError naming what changed, with both values.

        A run keeps its row length: rows of another length would cut the documents elsewhere, so a change in mid-run is refused.
        """
        for name, now in self._identity.items():
            if position[name] != now:
                raise ConfigError(
                    f"{name} was {position[name]} when the checkpoint was written and is {now} now: the data would not go on where they stopped; "
                    f"set it back, or start a new run"
                )
        step, rows = position["step"], self._cfg.train.rows_before(position["step"])
        if rows != position["rows"]:
            raise ConfigError(
                f"train.batch_size (with train.batch_ramp) gives {rows} rows in the first {step} steps, but the run had taken {position['rows']}: "
                "rows would be trained twice or skipped; set it back, or change it by a stage of train.batch_ramp from that step on"
            )
        self._next_step = step

    def report(self) -> dict[str, Any]:
        """Files, bytes, hashes, documents, tokens, fill rate, drops and the shares of the planned run."""
        cfg = self._cfg
        rows = cfg.train.rows_before(cfg.train.steps)
        rows = rows if self.rows_available is None else min(rows, self.rows_available)
        dealt = self._mixture.rows_of(rows)
        sources = []
        for index, (part, layout) in enumerate(zip(self.corpus.parts, self._layouts, strict=True)):
            held = part.store.bytes[self.corpus.held_out[index]]
            sources.append(
                {
                    "name": part.inventory.name,
                    "files": part.inventory.files,
                    "bytes": part.inventory.bytes,
                    "sha256": part.inventory.sha256,
                    "skipped_files": len(part.inventory.skipped),
                    "documents": len(part.store.length),
                    "held_out_documents": len(held),
                    "dropped_documents": part.dropped,
                    "tokens": int(part.store.first[-1]),
                    "held_out_tokens": int(part.held_out.length.sum()),
                    "packing": cfg.data.packing,
                    "epoch": asdict(layout.kept()),
                    "rows_planned": int(dealt[index]),
                    "share": float(dealt[index] / max(rows, 1)),
                }
            )
        return {
            "data_hash": self.data_hash,
            "tokenizer": {"hash": self.tokenizer.hash, "vocab_size": self.tokenizer.vocab_size},
            "held_out_bytes": self.held_out_bytes,
            "sources": sources,
        }

    def _hash_data(self) -> str:
        """Of the documents, their split, the tokenizer and the mixture."""
        data = self._cfg.data
        sources = [(p.inventory.sha256, p.inventory.reading, s.weight) for p, s in zip(self.corpus.parts, data.sources, strict=True)]
        return hashlib.sha256(json.dumps([sources, self.tokenizer.hash, data.val_fraction]).encode()).hexdigest()

    @property
    def _identity(self) -> dict[str, Any]:
        train, data = self._cfg.train, self._cfg.data
        return {
            "data_hash": self.data_hash,
            "train.seq_len": train.seq_len,
            "train.seed": train.seed,
            "data.packing": data.packing,
            "data.max_segments": data.max_segments,
            "data.shuffle": data.shuffle,
        }

    def _block(self, size: int, name: str) -> range:
        """This process's rows of a global batch of `size` rows."""
        each, rest = divmod(size, self._processes)
        if rest:
            raise ConfigError(f"{name}={size} is not divisible by the {self._processes} processes; allowed: multiples of {self._processes}")
        return range(self._process * each, (self._process + 1) * each)

    def _rows(self, first: int, block: range, available: int | None) -> Batch:
        """The rows of a block; each source's among them follow one another in its own numbering, so that one look-up finds their spans."""
        width, epochs = self._cfg.train.seq_len, self._cfg.data.epochs
        source, local = self._mixture.locate(np.arange(first + block.start, first + block.stop))
        real = np.arange(len(block)) if available is None else np.arange(len(block))[: max(0, available - first - block.start)]
        batch: Batch | None = None
        for index, (part, layout) in enumerate(zip(self.corpus.parts, self._layouts, strict=True)):
            at = real[source[real] == index]
            if batch is not None and not len(at):
                continue
            spans = layout.spans(int(local[at[0]]), int(local[at[-1]]) + 1, epochs=epochs) if len(at) else Spans.none()
            spans = Spans(at[spans.row], spans.document, spans.start, spans.length)
            filled = assemble(spans, layout.documents, part.store.tokens, rows=len(block), width=width)
            batch = filled if batch is None else {name: batch[name] + filled[name] for name in batch}
        assert batch is not None
        return batch
