"""What this machine has for Telamon, what it lacks, and the extra that brings it."""

import glob
import os
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from telamon.watch.environment import describe_environment

# Instructions that XLA's CPU backend makes use of, slowest first.
CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


@dataclass(frozen=True)
class Finding:
    """One line of the report. `advice` says what to do where something is missing."""

    subject: str
    state: str
    advice: str = ""


def examine(folder: str = ".") -> list[Finding]:
    """Look at versions, devices, memory, CPU and the disk of `folder`. Starts JAX's backend."""
    import psutil

    environment = describe_environment()
    devices, memory = environment["devices"], psutil.virtual_memory()
    disk = shutil.disk_usage(folder)
    return [
        Finding("python", environment["python"]),
        Finding("packages", ", ".join(f"{name} {version}" for name, version in environment["packages"].items())),
        Finding("devices", f"{devices['count']} x {devices['kind']} ({devices['platform']}){_gib(devices['memory_bytes'], ' of ')}"),
        Finding(
            "memory", f"{_gib(memory.available)} free of {_gib(memory.total)}", "" if memory.available > 2**31 else "close other programs"
        ),
        Finding("cpu", f"{environment['cpu']['model']}, {environment['cpu']['cores']} cores; {_features()}"),
        Finding(
            "disk", f"{_gib(disk.free)} free in {os.path.abspath(folder)}", "" if disk.free > 2**31 else "runs need space for checkpoints"
        ),
        _tpu(devices),
        _gpu(devices),
        _optional("cloud paths", "cloud", ("gcsfs", "s3fs", "adlfs")),
        _optional("Weights & Biases", "wandb", ("wandb",)),
    ]


def _gib(size: int | None, before: str = "") -> str:
    return "" if size is None else f"{before}{size / 2**30:.1f} GiB"


def _features() -> str:
    try:
        flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("flags")[2].partition("\n")[0].split())
    except OSError:
        return "features unknown"
    return ", ".join(name for name in CPU_FEATURES if name in flags) or "no AVX2: matrix products will be slow"


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _tpu(devices: dict[str, Any]) -> Finding:
    if devices["platform"] == "tpu":
        return Finding("TPU", "in use")
    if not _installed("libtpu"):
        return Finding("TPU", "libtpu is not installed", "on a TPU machine: pip install 'telamon[tpu]'")
    return Finding("TPU", "libtpu is installed, and JAX found no TPU", "nothing for `telamon plan`; on a TPU machine, unset JAX_PLATFORMS")


def _gpu(devices: dict[str, Any]) -> Finding:
    if devices["platform"] in ("gpu", "cuda", "rocm"):
        return Finding("GPU", "in use")
    driver = bool(glob.glob("/dev/nvidia[0-9]*")) or shutil.which("nvidia-smi") is not None
    found = "an NVIDIA driver is there" if driver else "no NVIDIA driver"
    if not _installed("jax-cuda13-plugin"):
        return Finding("GPU", f"{found}; JAX's CUDA plugin is not installed", "with an NVIDIA GPU: pip install 'telamon[cuda13]'")
    return Finding(
        "GPU",
        f"{found}; the CUDA plugin is installed, and JAX found no GPU",
        "" if driver else "nothing for `telamon plan`; with a GPU, install the NVIDIA driver, 580 or newer",
    )


def _optional(subject: str, extra: str, packages: tuple[str, ...]) -> Finding:
    there = [f"{name} {version}" for name in packages if (version := _installed(name))]
    missing = [name for name in packages if not _installed(name)]
    return Finding(subject, ", ".join(there) or "not installed", f"pip install 'telamon[{extra}]'" if missing else "")
