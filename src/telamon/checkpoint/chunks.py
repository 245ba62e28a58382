"""Stored arrays opened one by one with TensorStore, in the format Orbax writes: Zarr 3 in an OCDBT database.

Reading or writing a part takes the memory of a few chunks, whatever the array's size.
"""

import ctypes
import gc
import math
import os
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from etils import epath

_LEAST, _MOST = 1 << 20, 1 << 26
_AT_ONCE = {"file_io_concurrency": {"limit": 4}, "data_copy_concurrency": {"limit": 2}}
_NODE_BYTES = 1 << 16
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h


def chunk_shape(shape: tuple[int, ...], itemsize: int, target: int) -> tuple[int, ...]:
    """The rows of an array [rows, ...] that make a chunk of about `target` bytes, in equal chunks."""
    if not shape:
        return ()
    row = max(1, math.prod(shape[1:])) * itemsize
    chunks = min(max(1, -(-shape[0] * row // target)), shape[0])
    return (-(-shape[0] // chunks), *shape[1:])


def target_bytes(largest: int) -> int:
    """Bytes of a chunk, when the largest tensor has `largest`.

    Writing holds a few chunks beside the tensor. Many small chunks are slow and leave many files; so they grow with the model.
    """
    return min(max(largest // 16, _LEAST), _MOST)


def contiguous(array: np.ndarray) -> np.ndarray:
    """The array in C order, at the speed of memory; itself where it is that already.

    NumPy copies a transposed matrix element by element, five to ten times slower than XLA, which goes by blocks.
    """
    if array.flags.c_contiguous or array.dtype.itemsize > 4:  # JAX would cut longer words
        return np.ascontiguousarray(array)
    words = array.view(f"u{array.dtype.itemsize}")
    copy = np.asarray(jax.device_put(words, jax.local_devices(backend="cpu")[0])).view(array.dtype)
    gc.collect(0)  # JAX gives up its reference to `array`, a whole tensor, at the next collection of garbage
    return copy


def create(
    folder: epath.Path, name: str, shape: tuple[int, ...], dtype: Any, chunk: tuple[int, ...], context: ts.Context
) -> ts.TensorStore:
    """Make the array `name` in the part of the database at `folder` that Orbax merges when the save is done."""
    metadata = {
        "shape": shape,
        "data_type": np.dtype(dtype).name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
    }
    # Each commit writes the path to its leaf anew: nodes stay small, so that many commits stay cheap.
    config = {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": _NODE_BYTES, "manifest_kind": "single"}
    database = {"config": config, "assume_config": True}
    spec = {**_spec(folder / "ocdbt.process_0", name, database), "metadata": metadata, "store_data_equal_to_fill_value": True}
    return ts.open(spec, create=True, context=context).result()


def open_to_read(folder: epath.Path, name: str, context: ts.Context) -> ts.TensorStore:
    """The array `name` of the database at `folder`; what was never written is an error."""
    return ts.open({**_spec(folder, name, {}), "fill_missing_data_reads": False}, read=True, context=context).result()


def new_context(chunk_bytes: int) -> ts.Context:
    """Few reads and writes at a time, of chunks of about this size, for the memory's sake."""
    _return_freed_memory(2 * chunk_bytes)
    return ts.Context(_AT_ONCE)


def _return_freed_memory(least: int) -> None:
    """Let the C library, if it is glibc, give each block longer than `least` back to the system as it is freed, from now on.

    By default it takes such blocks from a heap once one as long was freed, and there a chunk that is still being written keeps
    the room of the whole tensor before it from being reused. Chunks do come from the heap: new memory costs more than its use.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, least)
        mallopt(_M_TRIM_THRESHOLD, least)


def _spec(folder: epath.Path, name: str, database: dict[str, Any]) -> dict[str, Any]:
    path = os.fspath(folder)
    place: Any = path + "/" if "://" in path else {"driver": "file", "path": path + "/"}
    kvstore = {"driver": "ocdbt", "base": place, "path": name, **database}
    if database and "://" not in path:
        # Files are put on disk at the end, all at once: after each chunk it would take longer than writing them. And those of
        # values need no rename once they are whole, since only the manifest refers to them.
        kvstore |= {"base": {**place, "file_io_sync": False, "file_io_locking": {"mode": "non_atomic"}}}
        kvstore |= {"manifest": {**place, "file_io_sync": False}}
    return {"driver": "zarr3", "kvstore": kvstore, "recheck_cached_data": False, "recheck_cached_metadata": False}
