"""From a process's rows on the host to one global batch on the devices."""

from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import Mesh

from telamon.parallel.rules import batch_sharding

Batch = Mapping[str, jax.Array]
"""tokens, targets, mask, segments, positions and bytes, each [B, T] (see `telamon.data`)."""

LEAVES = {"tokens": np.int32, "targets": np.int32, "mask": np.float32, "segments": np.int32, "positions": np.int32, "bytes": np.int32}
"""Arrays of a batch, [B, T] each, and their types. `bytes` is the text that each trained target stands for."""


def place(batch: Mapping[str, np.ndarray], *, token_bytes: np.ndarray, mesh: Mesh) -> Batch:
    """Put this process's rows [b, T] where the mesh wants them, as arrays [B, T] over all processes."""
    full = {**batch, "bytes": token_bytes[batch["targets"]]}
    sharding = batch_sharding(mesh)
    arrays = {name: np.asarray(full[name], dtype) for name, dtype in LEAVES.items()}
    if jax.process_count() == 1:
        return jax.device_put(arrays, sharding)
    return {name: jax.make_array_from_process_local_data(sharding, array) for name, array in arrays.items()}


def abstract_batch(*, rows: int, seq_len: int, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, types and shardings of a batch."""
    sharding = batch_sharding(mesh)
    return {name: jax.ShapeDtypeStruct((rows, seq_len), dtype, sharding=sharding) for name, dtype in LEAVES.items()}
