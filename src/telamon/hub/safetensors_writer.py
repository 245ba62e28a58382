"""Writing a safetensors file tensor by tensor: shapes and types are known before, so the header goes first."""

import json
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from telamon.checkpoint.chunks import contiguous
from telamon.hub.safetensors_format import DTYPES, LENGTH_BYTES
from telamon.hub.source import TensorInfo, numpy_dtype

if TYPE_CHECKING:
    import numpy as np

_CODES = {name: code for code, name in DTYPES.items()}
_ALIGNMENT = 8
_BLOCK = 1 << 22
_SYNC_BYTES = 1 << 27
_METADATA = {"format": "pt"}
"""Transformers refuses a file that does not say which library's layout its tensors have."""


class SafetensorsWriter:
    """A file being written; a context manager that puts it on disk. Nothing is held of a tensor once `write` returns.

    Args:
        path: of the new file.
        tensors: what it will hold.
    """

    def __init__(self, path: Path, tensors: Mapping[str, TensorInfo]):
        # The widest type first, as the library has it: then every tensor lies at a multiple of its item's size.
        self.order: tuple[str, ...] = tuple(sorted(tensors, key=lambda name: -tensors[name].itemsize))
        """Names in the order they are to be written in."""
        self._path, self._tensors = path, dict(tensors)
        self._next = iter(self.order)
        self._sent, self._synced = 0, Future[None]()
        self._synced.set_result(None)

    def __enter__(self) -> Self:
        self._file = self._path.open("wb")
        self._disk = ThreadPoolExecutor(1)
        self._file.write(_header({name: self._tensors[name] for name in self.order}))
        return self

    def write(self, name: str, array: "np.ndarray") -> None:
        """Append a tensor, which may lie in memory in any order; of one that does not lie as the file has it, a part is copied at a time."""
        import numpy as np

        info = self._tensors[name]
        assert name == next(self._next), f"{name} is written out of order"
        assert (array.shape, array.dtype) == (info.shape, numpy_dtype(info.dtype)), (name, array.shape, array.dtype, info)
        rows = max(1, _BLOCK * max(len(array), 1) // max(array.nbytes, 1)) if array.ndim else 1
        blocks = (array[row : row + rows] for row in range(0, len(array), rows)) if array.ndim else [array]
        for block in blocks:
            self._file.write(contiguous(block).reshape(-1).view(np.uint8).data)
        self._begin_to_sync()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._file, self._disk:
            if kind is None:
                assert next(self._next, None) is None, f"{self._path} was not written to its end"
                self._file.flush()
                os.fsync(self._file.fileno())
                self._synced.result()

    def _begin_to_sync(self) -> None:
        """The disk works while the next tensors are read, instead of only at the end."""
        if self._file.tell() - self._sent > _SYNC_BYTES and self._synced.done():
            self._synced.result()
            self._sent = self._file.tell()
            self._synced = self._disk.submit(os.fsync, self._file.fileno())


def _header(tensors: Mapping[str, TensorInfo]) -> bytes:
    fields: dict[str, object] = {"__metadata__": _METADATA}
    end = 0
    for name, info in tensors.items():
        begin, end = end, end + info.nbytes
        fields[name] = {"dtype": _CODES[info.dtype], "shape": info.shape, "data_offsets": (begin, end)}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text
