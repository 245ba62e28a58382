"""Parquet files as a source: one document a row of a text column."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from telamon.data.files import File
from telamon.data.sources import PIECE, FileFacts, Hashing, cut, in_parallel, take_inventory
from telamon.errors import DataError

_ROWS = 256
"""Rows decoded at one time."""


class Parquet:
    """One document a row. A null is a document without text."""

    def __init__(self, name: str, files: list[File], field: str):
        self._field = field
        self._facts: list[FileFacts] = in_parallel(self._scan, files)
        self.inventory = take_inventory(name, self._facts, reading=f"parquet {field}")

    def read(self, chosen: np.ndarray | None = None) -> Iterator[tuple[int, str]]:
        """See :class:`telamon.data.sources.Source`."""
        index = 0
        for fact in self._facts:
            with self._opened(fact.file) as table:
                for batch in table.iter_batches(batch_size=_ROWS, columns=[self._field]):
                    for text in batch.column(0):
                        if chosen is None or chosen[index]:
                            for piece in cut([text.as_py() or ""]):
                                yield index, piece
                        index += 1

    def _scan(self, file: File) -> FileFacts:
        with file.open() as handle:
            reader = Hashing(handle)
            while reader.read(PIECE):
                pass
        with self._opened(file) as table:
            rows = table.metadata.num_rows
        return FileFacts(file, reader.size, reader.digest(), np.arange(rows), np.full(rows, reader.size // max(rows, 1)))

    @contextmanager
    def _opened(self, file: File) -> Iterator[pq.ParquetFile]:
        """The file as a table that has the text column; whatever Arrow finds wrong becomes a DataError naming the file."""
        with file.open() as handle:
            try:
                table = pq.ParquetFile(handle)
                self._check_column(file.path, table.schema_arrow)
                yield table
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{file.path}: not a valid Parquet file: {error}") from error

    def _check_column(self, path: str, schema: pa.Schema) -> None:
        if self._field not in schema.names:
            raise DataError(
                f"{path}: no column {self._field!r}; columns there: {', '.join(map(repr, schema.names))}; set data.sources' field"
            )
        kind = schema.field(self._field).type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
            raise DataError(f"{path}: the column {self._field!r} holds {kind}; it must hold strings")
