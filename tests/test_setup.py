"""The set-up script, with stand-ins for the Python that makes the environment and for uv: what it calls, when, and what it leaves behind."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "setup.sh"

# Answers questions with the real interpreter; `-m venv` and `-m pip` are noted, and pip does what PIP says.
PYTHON = f"""#!/bin/sh
case "$1 $2" in
    "-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; echo venv >>"$CALLS" ;;
    "-m pip") echo pip >>"$CALLS"; eval "$PIP" ;;
    *"_base_executable"*) echo "$0" ;;
    *) exec {sys.executable} "$@" ;;
esac
"""
UV = """#!/bin/sh
case "$1" in
    --version) echo uv ;;
    venv) eval "$UV"; for last; do :; done; mkdir -p "$last/bin"; echo uv-venv >>"$CALLS" ;;
    pip) echo uv-pip >>"$CALLS" ;;
    *) exit 1 ;;
esac
"""


class Checkout:
    """A folder with what the script reads, and a PATH with stand-ins."""

    def __init__(self, root: Path) -> None:
        self.root, self.bin, self.calls = root / "checkout", root / "bin", root / "calls"
        (self.root / "scripts").mkdir(parents=True)
        shutil.copy(SCRIPT, self.root / "scripts")
        (self.root / "pyproject.toml").write_text("first")
        (self.root / "constraints.txt").write_text("first")
        self.bin.mkdir()
        # Every tool the script may use, and no Python or uv of the machine's own.
        for tool in ["sh", "cat", "cksum", "date", "dirname", "mktemp", "rm", "mkdir", "tail", "cp", "sleep"]:
            (self.bin / tool).symlink_to(shutil.which(tool) or "")
        self.add("python3.12", PYTHON)

    def add(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def start(self, settings: Mapping[str, str]) -> subprocess.Popen[str]:
        environment = {"PATH": str(self.bin), "HOME": str(self.root), "CALLS": str(self.calls), "PIP": ":", "UV": ":"}
        return subprocess.Popen(
            ["sh", self.root / "scripts" / "setup.sh"],
            cwd="/",
            env={**environment, **settings},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, **settings: str) -> tuple[int, str, list[str]]:
        """Exit code, output, and the calls that were made."""
        self.calls.write_text("")
        process = self.start(settings)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output, self.calls.read_text().split()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_with_pip_alone_once_and_again_when_the_versions_change(checkout: Checkout) -> None:
    code, output, calls = checkout.run()
    assert (code, calls) == (0, ["venv", "pip"])
    assert "installing packages with pip" in output
    assert checkout.run() == (0, "", [])
    (checkout.root / "constraints.txt").write_text("second")
    assert checkout.run()[2] == ["venv", "pip"]


def test_uv_is_used_when_it_is_there(checkout: Checkout) -> None:
    checkout.add("uv", UV)
    assert checkout.run()[2] == ["uv-venv", "uv-pip"]


@pytest.mark.parametrize("uv", ["#!/bin/sh\nexit 127\n", UV], ids=["a shim of nothing", "one that fails later"])
def test_a_uv_that_does_not_work_gives_way_to_pip(checkout: Checkout, uv: str) -> None:
    checkout.add("uv", uv)
    code, _, calls = checkout.run(UV="exit 2")
    assert (code, calls) == (0, ["venv", "pip"])


def test_a_failed_installation_says_why_and_is_never_taken_for_whole(checkout: Checkout) -> None:
    code, output, _ = checkout.run(PIP="echo no such package; exit 1")
    assert code == 1
    assert "no such package" in output
    assert "the installation failed" in output
    assert checkout.run()[2] == ["venv", "pip"]


def test_a_set_up_that_was_killed_starts_anew(checkout: Checkout) -> None:
    assert checkout.run(PIP="kill -9 $PPID")[0] != 0
    left = checkout.root / ".venv" / "half"
    left.write_text("")
    assert checkout.run()[2] == ["venv", "pip"]
    assert not left.exists()


def test_two_at_once_install_once(checkout: Checkout) -> None:
    checkout.calls.write_text("")
    both = [checkout.start({"PIP": "sleep 1"}) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert checkout.calls.read_text().split() == ["venv", "pip"]
    assert sum("waiting for another set-up" in output for output in outputs) == 1


def test_without_a_new_enough_python_the_error_says_what_to_install(checkout: Checkout) -> None:
    (checkout.bin / "python3.12").unlink()
    checkout.add("python3", "#!/bin/sh\nexit 1\n")
    code, output, _ = checkout.run()
    assert code == 1
    assert "no Python of 3.12 or newer found" in output


def test_a_version_of_pyenv_that_is_not_active_is_found(checkout: Checkout) -> None:
    (checkout.bin / "python3.12").unlink()
    version = checkout.root / "pyenv" / "versions" / "3.13.0" / "bin"
    version.mkdir(parents=True)
    (version / "python3").write_text(PYTHON)
    (version / "python3").chmod(0o755)
    code, output, _ = checkout.run(PYENV_ROOT=str(checkout.root / "pyenv"))
    assert code == 0
    assert os.fspath(version) in output
