"""A checkpoint of weights written and read part by part, for models that do not fit into memory.

    with StreamedWriter(run / "checkpoints", step=0, abstract=shapes, meta={}) as writer:
        writer.write("embedding", (), table)
        writer.write("stacks.0.blocks.0.mixer.query", (7,), query_of_the_eighth_repeat)

The result is a checkpoint like any other: `CheckpointStore.restore_subtree(0, "weights", ...)` reads it, on any mesh, and
so does Orbax. It is committed as others are, once everything has been written, and until then is provably unfinished.

Orbax does the saving; only the arrays' values do not come from its own handlers. It asks a leaf handler to write the
leaves and waits for it in the background; ours waits in turn for the writer to be closed.
"""

import asyncio
import dataclasses
import math
import os
import sys
from collections import deque
from collections.abc import Awaitable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self

import jax
import numpy as np
import tensorstore as ts
from etils import epath
from orbax.checkpoint import v1 as ocp

from telamon.checkpoint import chunks, layouts, trees
from telamon.checkpoint.manifest import ArrayInfo
from telamon.checkpoint.store import STATE, CheckpointStore
from telamon.errors import CheckpointError

PREFIX = "weights."
_PATIENCE = 30 * 24 * 3600.0
_SHOWN = 3


class StreamedWriter:
    """Writes the checkpoint of `step` in one process, at the memory of a few chunks; a context manager that commits it.

    Args:
        directory: the folder of checkpoints of a run, as of `CheckpointStore`.
        step: the step's number.
        abstract: {dotted path: anything with the whole shape, with the layer axis if it is stacked, and the type on disk}.
        meta: what `CheckpointStore.meta` gives back.
        expertwise: paths of weights that come expert by expert, if stacked within a layer.

    Raises:
        CheckpointError: the folder cannot be used, a whole checkpoint of that step is in the way, writing fails, or (at
            the end) something was not written; the message says what. Nothing is left of it then.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        step: int,
        abstract: Mapping[str, Any],
        meta: dict[str, Any],
        expertwise: Collection[str] = (),
    ):
        assert jax.process_count() == 1, "only one process can stream"
        self._step, self._meta = step, meta
        depths = {path: layouts.is_stacked(path) + (path in expertwise) for path in abstract}
        chunk_bytes = chunks.target_bytes(max(_part_bytes(leaf, depths[path]) for path, leaf in abstract.items()))
        self._context = chunks.new_context(chunk_bytes)
        self._leaves = {path: _Leaf(leaf, depths[path], chunk_bytes) for path, leaf in abstract.items()}
        self._missing: dict[str, set[tuple[int, ...]]] = {path: leaf.indices() for path, leaf in self._leaves.items()}
        self._store = CheckpointStore(directory, keep=sys.maxsize)
        self._closed: Future[None] = Future()
        self._in_flight: deque[Any] = deque()

    def __enter__(self) -> Self:
        arrays = {PREFIX + path: ArrayInfo(leaf.shape, leaf.dtype.name) for path, leaf in self._leaves.items()}
        tree = trees.nest({PREFIX + path: leaf for path, leaf in self._leaves.items()})
        self._store.start(self._step, _StreamedTree(tree, self._closed, self._context), self._meta, arrays, patience=_PATIENCE)
        return self

    def write(self, path: str, index: tuple[int, ...], array: np.ndarray) -> None:
        """Write a part of a weight, in any memory order.

        Args:
            path: of the weight.
            index: the layer, for one that is stacked; behind it the expert, for one that comes expert by expert; else nothing.
            array: the part; it may be changed once this returns.
        """
        leaf = self._leaves[path]
        assert index in self._missing[path], f"{path}, part {index}: written twice, or not a part of the weight"
        assert array.shape == leaf.part and array.dtype == leaf.dtype, (path, array.shape, array.dtype, leaf.part, leaf.dtype)
        try:
            for rows in leaf.row_blocks():
                block = chunks.contiguous(array[rows])
                block = block.copy() if np.may_share_memory(block, array) else block
                self._wait_for_room()
                self._in_flight.append(leaf.array[(*index, rows)].write(block, can_reference_source_data_indefinitely=True))
        except Exception as error:
            raise self._store.write_error(self._step, error) from error
        self._missing[path].remove(index)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *rest: object) -> None:
        """Commit; or on an exception, or with something missing, remove what was written."""
        if error is None:
            error = self._what_is_wrong()
        if error is None:
            self._closed.set_result(None)
            self._store.wait()
            return
        self._settle()
        self._closed.set_exception(_AbandonedError())
        try:
            self._store.wait()
        except CheckpointError as abandoned:
            if not isinstance(abandoned.__cause__, _AbandonedError):
                raise abandoned from error
        if kind is None:
            raise error

    def _wait_for_room(self) -> None:
        """At most two chunks are being written at a time."""
        while len(self._in_flight) > 1:
            self._in_flight.popleft().result()

    def _settle(self) -> None:
        """Wait for what is being written, however it ends: what comes later would make removed folders anew."""
        while self._in_flight:
            self._in_flight.popleft().exception()

    def _what_is_wrong(self) -> CheckpointError | None:
        try:
            while self._in_flight:
                self._in_flight.popleft().result()
        except Exception as error:
            return self._store.write_error(self._step, error)
        missing = [path if () in parts else f"{path} (layers {_layers(parts)})" for path, parts in self._missing.items() if parts]
        if not missing:
            return None
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        return CheckpointError(f"the checkpoint of step {self._step} was not written: it lacks {', '.join(missing[:_SHOWN])}{more}")


class StreamedReader:
    """Reads weights of a checkpoint one slice at a time. Every byte is checked first, as for any restore.

    Args:
        directory: the folder of checkpoints of a run, as of `CheckpointStore`.
        step: the step's number; none: the newest whole one.
        abstract: {dotted path: anything with a shape}, the weights as the caller's model stacks them. `arrays` and `read` then
            go by it, however the checkpoint's layers are stacked; none: by the checkpoint.
        target: what `abstract` was made from, for messages.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or its weights are not those of `abstract`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        step: int | None = None,
        *,
        abstract: Mapping[str, Any] | None = None,
        target: str = "the model of this run",
    ):
        store = CheckpointStore(directory, readonly=True)
        if step is None:
            step = store.latest_valid()
        if step is None:
            raise store.none_whole(str(directory))
        contents = store.contents(step)
        self.step = step
        """The step's number."""
        self.meta: dict[str, Any] = contents.meta
        """What the checkpoint was saved with."""
        self.arrays = {name.removeprefix(PREFIX): info for name, info in contents.arrays.items() if name.startswith(PREFIX)}
        """Shape, with the layer axis if it is stacked, and type of each weight by its dotted path."""
        self._places: dict[layouts.Slot, layouts.Slot] = {}
        if abstract is not None:
            self._cut_as(abstract, str(store.path(step)), target)
        self._folder = store.path(step) / STATE
        largest = max(_part_bytes(leaf, layouts.is_stacked(path)) for path, leaf in self.arrays.items())
        self._context = chunks.new_context(chunks.target_bytes(largest))

    def read(self, path: str, index: tuple[int, ...]) -> np.ndarray:
        """The whole weight, or with the layer (and a place within it) as `index` that part of a stacked one; its type is that on disk."""
        if index:
            place = self._places.get(layouts.Slot(path, index[0]), layouts.Slot(path, index[0]))
            path, index = place.name, (place.row, *index[1:])
        try:
            stored = chunks.open_to_read(self._folder, PREFIX + path, self._context)[index]
            array = np.empty(stored.shape, stored.dtype.numpy_dtype)
            ts.array(array).write(stored).result()
            return array
        except Exception as error:
            raise CheckpointError(f"{path} cannot be read from {self._folder}: {error}") from error

    def _cut_as(self, abstract: Mapping[str, Any], checkpoint: str, target: str) -> None:
        wanted = {path: jax.ShapeDtypeStruct(leaf.shape, np.float32) for path, leaf in abstract.items()}
        trees.check_fits(layouts.by_layer(self.arrays), layouts.by_layer(wanted), checkpoint=checkpoint, target=target)
        saved = layouts.slots(self.arrays)
        self._places = {slot: saved[name] for name, slot in layouts.slots(wanted).items()}
        first = {path: self._places.get(layouts.Slot(path, 0), layouts.Slot(path, 0)).name for path in wanted}
        self.arrays = {path: dataclasses.replace(self.arrays[first[path]], shape=leaf.shape) for path, leaf in wanted.items()}


class _AbandonedError(Exception):
    """The writer's block ended with an exception."""


class _Leaf:
    """A weight to be written: what Orbax sees in place of an array. `array` is open once the save has begun."""

    array: Any

    def __init__(self, abstract: Any, depth: int, chunk_bytes: int):
        self.shape, self.dtype = tuple(abstract.shape), np.dtype(abstract.dtype)
        self._counted, self.part = self.shape[:depth], self.shape[depth:]
        self._chunk = chunks.chunk_shape(self.part, self.dtype.itemsize, chunk_bytes)

    def indices(self) -> set[tuple[int, ...]]:
        """The parts to be written; of a weight that is written whole, the one without an index."""
        return set(np.ndindex(self._counted))

    def row_blocks(self) -> list[Any]:
        """Index expressions of the chunks of a part."""
        if not self.part:
            return [...]
        return [slice(row, min(row + self._chunk[0], self.part[0])) for row in range(0, self.part[0], self._chunk[0])]

    def open(self, folder: epath.Path, name: str, context: ts.Context) -> None:
        """Create the array in a checkpoint's folder."""
        chunk = (*(1 for _ in self._counted), *self._chunk)
        self.array = chunks.create(folder, name, self.shape, self.dtype, chunk, context)


class _StreamedTree:
    """What Orbax saves: a tree of `_Leaf`s, which is whole once `closed` has a result."""

    def __init__(self, tree: dict[str, Any], closed: Future[None], context: ts.Context):
        self._tree, self._handler = tree, _LeafHandler(closed, context)

    async def save(self, directory: Any) -> Awaitable[None]:
        registry: Any = _Registry(self._handler)
        return await ocp.handlers.PyTreeHandler(leaf_handler_registry=registry).save(directory, self._tree)

    async def load(self, directory: Any) -> Awaitable[None]:
        raise NotImplementedError("read it as the tree of arrays that it is on disk")


class _LeafHandler:
    """Opens the arrays, then waits for the writer."""

    def __init__(self, closed: Future[None], context: ts.Context):
        self._closed, self._context = closed, context

    async def serialize(self, params: Sequence[Any], serialization_context: Any) -> Awaitable[None]:
        folder = await serialization_context.parent_dir.await_creation()
        for param in params:
            param.value.open(folder, param.name, self._context)
        return self._wait()

    async def _wait(self) -> None:
        await asyncio.wrap_future(self._closed)


class _Registry:
    """As much of Orbax's table of leaf handlers as saving asks for. On disk the leaves are NumPy arrays: they have no sharding."""

    def __init__(self, handler: _LeafHandler):
        self._handler = handler

    def get_all(self) -> list[tuple[type, type, Any]]:
        return [(_Leaf, _Leaf, self._make)]

    def is_handleable(self, leaf_type: type) -> bool:
        return leaf_type is _Leaf

    def is_abstract_handleable(self, abstract_type: type) -> bool:
        return False

    def get_secondary_typestrs(self, handler_type: Any) -> list[str]:
        return ["np.ndarray"]

    def _make(self, context: Any) -> _LeafHandler:
        return self._handler


def _part_bytes(leaf: Any, depth: int) -> int:
    """Bytes that are written or read at once of a weight whose first `depth` dims count its parts."""
    return math.prod(leaf.shape[depth:]) * np.dtype(leaf.dtype).itemsize


def _layers(parts: set[Any]) -> str:
    shown = sorted({part[0] for part in parts})
    return ", ".join(map(str, shown[:_SHOWN])) + (", ..." if len(shown) > _SHOWN else "")
