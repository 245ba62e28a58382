"""Rules of the house that no linter knows: pinned versions, a light command line, one place for meshes, short files."""

import ast
import os
import re
import resource
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))
MESH_BUILDERS = {
    "jax.make_mesh",
    "jax.sharding.Mesh",
    "jax.experimental.mesh_utils.create_device_mesh",
    "jax.experimental.mesh_utils.create_hybrid_device_mesh",
}


def _distribution(requirement: str) -> str:
    name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def _pins() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_constraints_are_exact_versions_without_any_url() -> None:
    odd = [line for line in _pins() if not re.fullmatch(r"[\w.-]+==[\w.+!]+(\s*;.*)?", line)]
    assert not odd


def test_every_requirement_of_the_default_and_dev_install_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {_distribution(r) for r in project["dependencies"] + project["optional-dependencies"]["dev"]}
    assert wanted <= {_distribution(line) for line in _pins()}


def test_default_requirements_name_no_other_framework_and_no_cloud_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    unwanted = re.compile(r"(google-cloud|gcsfs|tensorflow|torch|tokamax)")
    assert not [r for r in project["dependencies"] if unwanted.match(_distribution(r))]


def test_files_stay_short() -> None:
    files = [*SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    long = {str(f.relative_to(ROOT)): n for f in files if (n := len(f.read_text().splitlines())) >= 800}
    assert not long


def test_no_two_files_of_tests_have_one_name() -> None:
    """Pytest imports them by their names alone, and refuses the second."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_source_names_no_torch() -> None:
    assert not [str(f.relative_to(ROOT)) for f in SOURCES if re.search(r"\btorch\b", f.read_text())]


def _origins(tree: ast.AST) -> dict[str, str]:
    """What each imported name of a module stands for, as a dotted path."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {a.asname or a.name.partition(".")[0]: a.name if a.asname else a.name.partition(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return names


def _dotted(node: ast.expr, origins: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value, origins)}.{node.attr}"
    return origins.get(node.id, node.id) if isinstance(node, ast.Name) else "?"


def mesh_calls(source: str) -> Iterator[int]:
    """Lines on which a module builds a mesh, whatever name it imported the builder by."""
    tree = ast.parse(source)
    origins = _origins(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _dotted(node.func, origins) in MESH_BUILDERS:
            yield node.lineno


@pytest.mark.parametrize(
    "source",
    [
        "import jax\njax.make_mesh((1,), ('data',))",
        "from jax import sharding as s\ns.Mesh(devices, ('data',))",
        "from jax.sharding import Mesh as M\nM(devices, ('data',))",
        "from jax.experimental import mesh_utils\nmesh_utils.create_device_mesh((1,))",
    ],
)
def test_mesh_search_sees_through_import_names(source: str) -> None:
    assert list(mesh_calls(source)) == [2]


def test_meshes_are_built_in_one_folder_only() -> None:
    elsewhere = [f for f in SOURCES if f.relative_to(ROOT / "src" / "telamon").parts[0] != "parallel"]
    found = [f"{f.relative_to(ROOT)}:{line}" for f in elsewhere for line in mesh_calls(f.read_text())]
    assert not found


def _help(*python_options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *python_options, "-m", "telamon", "--help"]
    return subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "100"})


def test_help_answers_in_under_seven_tenths_of_a_second() -> None:
    # Processor time, since the other test worker may hold the core; on a quiet machine the clock says the same.
    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        _help()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    _help()  # compiles the bytecode once
    assert statistics.median(seconds() for _ in range(5)) < 0.7


def test_help_imports_no_heavy_library() -> None:
    trace = _help("-X", "importtime").stderr
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in trace.splitlines() if line.startswith("import time:")}
    assert "typer" in imported
    assert not imported & {
        "jax",
        "jaxlib",
        "flax",
        "optax",
        "orbax",
        "grain",
        "pyarrow",
        "tokenizers",
        "tensorboard",
        "numpy",
        "huggingface_hub",
    }


def test_map_names_every_folder_of_the_package() -> None:
    folders = {f"src/telamon/{f.name}/" for f in (ROOT / "src" / "telamon").iterdir() if f.is_dir() and f.name != "__pycache__"}
    mapped = re.findall(r"^\| `(src/telamon/\w+/)`", (ROOT / "AGENTS.md").read_text(), re.MULTILINE)
    assert sorted(mapped) == sorted(folders), "AGENTS.md has one line for each folder of the package"
