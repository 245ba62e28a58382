"""`environment.json`: what a run ran on and with, so that its figures can be understood later."""

import json
import os
import platform
import re
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from telamon import __version__
from telamon.watch.files import join, write_text

ENVIRONMENT = "environment.json"

PACKAGES = (
    "jax",
    "jaxlib",
    "libtpu",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "qwix",
    "tokamax",
    "tokenizers",
    "numpy",
    "pydantic",
)
VARIABLES = re.compile(r"XLA_|JAX_|LIBTPU_|TPU_|NCCL_|CUDA_VISIBLE_DEVICES$|OMP_NUM_THREADS$")


def describe_environment() -> dict[str, Any]:
    """Versions, git state, devices, CPU, memory, flags and command line, as plain JSON values.

    Starts JAX's backend where none is running yet. Packages that are not installed are left out.
    """
    import psutil

    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "python": platform.python_version(),
        "packages": package_versions(),
        "git": git_state(),
        "system": platform.platform(),
        "cpu": {
            "model": cpu_model(),
            "cores": len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else os.cpu_count(),
        },
        "memory_bytes": psutil.virtual_memory().total,
        "devices": _devices(),
        "variables": {name: value for name, value in sorted(os.environ.items()) if VARIABLES.match(name)},
    }


def package_versions() -> dict[str, str]:
    """Versions of Telamon and of the packages that figures depend on, of those that are installed."""
    versions = {"telamon": __version__}  # of the code that runs, which need not be an installed package
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def git_state(file: str = __file__) -> dict[str, Any] | None:
    """Commit of the checkout that `file` belongs to and whether it was changed since; none outside of one.

    A file that merely lies in a checkout (a package installed below somebody's project) is not of it.
    """
    folder = str(Path(file).parent)

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if not git("ls-files", "--", file):
        return None
    return {"sha": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}


def cpu_model() -> str:
    """Name of this machine's processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _devices() -> dict[str, Any]:
    import jax

    devices = jax.devices()
    memory = (devices[0].memory_stats() or {}) if devices[0].process_index == jax.process_index() else {}
    return {
        "platform": devices[0].platform,
        "kind": devices[0].device_kind,
        "count": len(devices),
        "processes": jax.process_count(),
        "memory_bytes": memory.get("bytes_limit"),
    }


def write_environment(run_dir: str | os.PathLike[str], environment: dict[str, Any]) -> None:
    """Write `environment.json`."""
    write_text(join(run_dir, ENVIRONMENT), json.dumps(environment, indent=2) + "\n")
