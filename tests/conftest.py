"""Settings every test shares; read before anything imports JAX.

Eight fake CPU devices stand in for a mesh. Compiled programs are cached on disk, so that the two workers of a
run, the processes that tests start, and the next run each compile a program once.
"""

import os
from pathlib import Path

from hypothesis import settings

_CACHE = Path(__file__).parent.parent / ".cache" / "jax-tests"

os.environ.update(
    JAX_PLATFORMS="cpu",
    JAX_COMPILATION_CACHE_DIR=os.environ.get("JAX_COMPILATION_CACHE_DIR", str(_CACHE)),
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
    JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
    # Eight devices share a few cores: one that waits long for its peers is slow, not lost.
    XLA_FLAGS="--xla_force_host_platform_device_count=8 --xla_cpu_collective_call_terminate_timeout_seconds=600",
)

# A time limit per example would fail on a busy machine; fixed examples make a failure repeat.
settings.register_profile("telamon", deadline=None, derandomize=True, max_examples=30, database=None)
settings.load_profile("telamon")
