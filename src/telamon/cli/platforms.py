"""Compilers for accelerators on a machine that has none."""

import glob
import os
import sys
from importlib.util import find_spec
from pathlib import Path

_COMPILERS = ("libtpu", "jax_cuda13_plugin", "jax_cuda12_plugin")

_MAKERS = {"0x1ae0", "0x10de", "0x1002"}
"""PCI's numbers of Google, NVIDIA and AMD, whose devices JAX may know what to do with."""

_DEVICES = ("/dev/nvidia*", "/dev/accel*", "/dev/vfio/*", "/dev/dxg", "/dev/kfd", "/dev/nvhost*")


def spare_absent_accelerators() -> None:
    """Keep JAX to the CPU where a compiler for accelerators is installed (for `telamon plan`) and no accelerator is there.

    JAX would try each of them at every start and fail, with pages of messages. Whoever sets `JAX_PLATFORMS` decides. Where
    there is any sign of an accelerator, nothing is done.
    """
    if "JAX_PLATFORMS" in os.environ or not sys.platform.startswith("linux") or not any(find_spec(name) for name in _COMPILERS):
        return
    if any(glob.glob(pattern) for pattern in _DEVICES) or _MAKERS & _makers():
        return
    os.environ["JAX_PLATFORMS"] = "cpu"


def _makers() -> set[str]:
    """Makers of the devices on the PCI bus; a bus that cannot be read may hold anything."""
    try:
        return {Path(path).read_text().strip() for path in glob.glob("/sys/bus/pci/devices/*/vendor")}
    except OSError:
        return _MAKERS
