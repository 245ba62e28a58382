"""A program for the tests: streams a checkpoint of four layers of 4 MB each.

    python streamed_writer.py FOLDER [--kill-at LAYER] [--limit BYTES]

--kill-at kills the process with SIGKILL before that layer; --limit makes every file longer than BYTES fail, as on a full disk.
"""

import argparse
import os
import resource
import signal
import sys

import jax
import numpy as np

from telamon.checkpoint.streamed import StreamedWriter
from telamon.errors import TelamonError

PATH = "stacks.0.blocks.0.ffn.up"
SHAPE = (4, 1024, 1024)


def layer(index):
    return np.random.default_rng(index).standard_normal(SHAPE[1:], np.float32)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--kill-at", type=int)
    parser.add_argument("--limit", type=int)
    args = parser.parse_args()
    if args.limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (args.limit, args.limit))
    try:
        with StreamedWriter(args.folder, step=0, abstract={PATH: jax.ShapeDtypeStruct(SHAPE, np.float32)}, meta={}) as writer:
            for index in range(SHAPE[0]):
                if index == args.kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                writer.write(PATH, (index,), layer(index))
    except TelamonError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
