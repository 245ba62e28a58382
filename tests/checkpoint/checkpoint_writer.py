"""A program for the tests: writes checkpoints until something stops it.

    python checkpoint_writer.py FOLDER FIRST LAST ROWS [--stage STAGE] [--limit BYTES] [--no-wait]

--stage kills the process with SIGKILL at that point of the save of step LAST; --limit makes every file longer than BYTES
fail from then on, as on a full disk; --no-wait ends the program while the last checkpoint is being written.
"""

import argparse
import os
import signal
import sys

import jax
import jax.numpy as jnp
from etils import epath

from telamon.checkpoint import manifest
from telamon.checkpoint.store import CheckpointStore
from telamon.errors import TelamonError
from telamon.watch import phases


def state_of(step, rows):
    """What the checkpoint of `step` must hold."""
    key = jax.random.key(step)
    return {"w": jax.random.normal(key, (rows, 256)), "b": jnp.full((3,), step, jnp.bfloat16), "key": key}


def die(*args, **kwargs):
    if args != ("checkpoint begin",):
        os.kill(os.getpid(), signal.SIGKILL)


STAGES = {
    "before the manifest": (manifest, "scan"),
    "before the manifest gets its name": (os, "replace"),
    "after the manifest": (phases, "mark"),
    "half-way through removing an old one": (type(epath.Path("/")), "rmtree"),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    parser.add_argument("rows", type=int)
    parser.add_argument("--stage", choices=STAGES)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--no-wait", action="store_true")
    args = parser.parse_args()
    store = CheckpointStore(args.folder, keep=2)
    try:
        for step in range(args.first, args.last + 1):
            if step == args.last:
                store.wait()
                if args.stage:
                    owner, name = STAGES[args.stage]
                    setattr(owner, name, die)
                if args.limit:
                    import resource

                    resource.setrlimit(resource.RLIMIT_FSIZE, (args.limit, args.limit))
            store.save(step, state_of(step, args.rows), {"step": step})
        if not args.no_wait:
            store.wait()
    except TelamonError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
