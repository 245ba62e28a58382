"""A program for the tests: one process of a run of two, with one device each, that share a folder of checkpoints.

    python checkpoint_peer.py FOLDER PORT INDEX

It saves steps 1 to 3, damages the newest, restores the newest whole one, and prints what it found.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from telamon.checkpoint.store import CheckpointStore


def state_of(step, layout):
    """An array split over both processes, a replicated one, and a replicated key."""

    def make():
        key = jax.random.key(step)
        return {"w": jax.random.normal(key, (512, 64)), "step": jnp.int32(step), "key": key}

    split, whole = NamedSharding(layout, PartitionSpec("fsdp")), NamedSharding(layout, PartitionSpec())
    return jax.jit(make, out_shardings={"w": split, "step": whole, "key": whole})()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("port", type=int)
    parser.add_argument("index", type=int)
    args = parser.parse_args()
    jax.distributed.initialize(f"127.0.0.1:{args.port}", 2, args.index)
    layout = jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Auto,))
    with CheckpointStore(args.folder) as store:
        for step in (1, 2, 3):
            store.save(step, state_of(step, layout), {"step": step})
    if args.index == 0:
        (args.folder / "step_00000003/state/manifest.ocdbt").write_bytes(b"")
    store = CheckpointStore(args.folder)
    print("latest", store.latest_valid())
    want = state_of(2, layout)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), want)
    got, meta = store.restore(2, like)
    print("meta", meta["step"])
    shards = zip(got["w"].addressable_shards, want["w"].addressable_shards, strict=True)
    print(
        "shards", all(np.array_equal(a.data, b.data) and a.index == b.index for a, b in shards), got["w"].addressable_shards[0].data.shape
    )
    print("key", np.array_equal(jax.random.key_data(got["key"]), jax.random.key_data(want["key"])))


if __name__ == "__main__":
    main()
