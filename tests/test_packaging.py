"""The wheel is whole, and works where nothing else is: an empty environment away from the checkout, without extras."""

import json
import os
import re
import resource
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
UNWANTED = re.compile(r"(google[-_.]cloud|gcsfs|tensorflow|torch|tokamax)")
# Every process that Python starts notes at its end which modules it had imported.
PROBE = """
import atexit, os, sys
atexit.register(lambda: open(os.environ["IMPORTED"], "a").write("\\n".join(sys.modules) + "\\n"))
"""

pytestmark = pytest.mark.xdist_group("packaging")


def _run(*command: str | Path, **options) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done


def _processor_seconds() -> float:
    """Time spent by the processes started so far; unlike the clock, it doesn't grow when the machine is busy."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT)
    (built,) = out.glob("telamon-*.whl")
    return built


def test_wheel_holds_every_source_file_preset_and_the_type_marker(wheel: Path) -> None:
    source = ROOT / "src"
    wanted = {str(f.relative_to(source)) for f in source.rglob("*") if f.suffix in {".py", ".yml", ".typed"}}
    assert any(name.endswith(".yml") for name in wanted)
    held = set(zipfile.ZipFile(wheel).namelist())
    assert wanted <= held
    assert any(name.endswith("licenses/LICENSE") for name in held)
    assert {name.partition("/")[0] for name in held if ".dist-info/" not in name} == {"telamon"}


@pytest.mark.slow
def test_wheel_trains_in_an_empty_environment_without_extras(wheel: Path, tmp_path: Path) -> None:
    python = tmp_path / "env" / "bin" / "python"
    shelf = tmp_path / "wheels"
    venv.create(tmp_path / "env", with_pip=True)
    _run(python, "-m", "pip", "download", "-d", shelf, "-c", ROOT / "constraints.txt", wheel)

    before = _processor_seconds()
    _run(python, "-m", "pip", "install", "--no-index", "--find-links", shelf, "-c", ROOT / "constraints.txt", wheel)
    installed = [d["name"] for d in json.loads(_run(python, "-m", "pip", "list", "--format", "json").stdout)]
    assert not [name for name in installed if UNWANTED.match(name.lower())]

    away = tmp_path / "elsewhere"
    away.mkdir()
    quiet = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "JAX_", "XLA_"))}
    (tmp_path / "probe").mkdir()
    (tmp_path / "probe" / "sitecustomize.py").write_text(PROBE)
    environment = {**quiet, "PYTHONPATH": str(tmp_path / "probe"), "IMPORTED": str(tmp_path / "imported")}
    telamon = python.parent / "telamon"
    assert "train" in _run(telamon, "--help", cwd=away, env=environment).stdout
    _run(telamon, "train", "tiny", "train.steps=5", "run.name=five", cwd=away, env=environment)
    assert _processor_seconds() - before < 120

    imported = set((tmp_path / "imported").read_text().split())
    assert {"jax", "orbax.checkpoint", "grain"} <= imported
    assert not [name for name in imported if re.match(r"(google\.cloud|gcsfs|tensorflow|torch|tokamax)\b", name)]
    summary = json.loads((away / "runs" / "five" / "summary.json").read_text())
    assert summary["steps"] == 5
