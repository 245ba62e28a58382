"""Large blocks that were freed are used again without a page fault, in every thread."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, threading
import numpy as np
if sys.argv[1] == "keep":
    from telamon.parallel.host_memory import keep_freed_memory
    keep_freed_memory()

def touch():
    np.ones(128 << 20, np.uint8)

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    thread = threading.Thread(target=touch)
    thread.start()
    thread.join()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc alone has these settings")
def test_freed_memory_is_kept():
    def faults(mode: str) -> int:
        return int(subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True).stdout)

    # 128 MB are 32,768 pages of 4 kB, or 64 where the system gives pages of 2 MB.
    assert faults("keep") < 64 <= faults("default")
