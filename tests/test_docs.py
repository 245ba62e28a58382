"""The pages of the documentation: every `bash` block runs as written, every link leads somewhere.

A page's blocks run in order, in one empty folder, so that a page may build on what it did above. Two commands are stood in
for: `git clone` makes the folder, and `make` trains for its target `train` and only looks up any other. The default run is
made small by overrides of its sizes and one folder of the standard library for its text; a command that names the preset `tiny` runs as it stands. Blocks in another language
(`text`, `yaml`, `python`) are shown, not run.
"""

import email
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
CORPUS = f"{Path(email.__file__).parent}/*.py"
SMALL = (
    f"'data.sources=[{{kind: text, path: \"{CORPUS}\"}}]' data.val_fraction=0.1 "
    "model.preset=tiny-llama data.tokenizer.vocab_size=512 train.steps=4 train.batch_size=8 train.seq_len=128 eval.batches=2 sample.tokens=4"
)


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[str]:
    """The `bash` blocks of a page, in order."""
    return re.findall(r"^```bash\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def _stand_ins(folder: Path) -> None:
    """Put the commands of the pages into `folder`, which comes first in PATH."""
    telamon = f"{shlex.quote(sys.executable)} -m telamon"
    scripts = {
        "telamon": f"""case "$*" in
            "train" | "train default"*) exec {telamon} "$@" {SMALL} ;;
            *) exec {telamon} "$@" ;;
        esac""",
        "make": f"""case "$1" in
            train) shift; eval exec telamon train default "${{1#ARGS=}}" ;;
            *) exec {shlex.quote(_which("make"))} -n -C {shlex.quote(str(ROOT))} "$@" ;;
        esac""",
        "git": """[ "$1" = clone ] || exit 1
            folder=${3:-$(basename "$2" .git)}
            mkdir -p "$folder/.venv/bin" && : > "$folder/.venv/bin/activate" """,
    }
    folder.mkdir()
    for name, text in scripts.items():
        script = folder / name
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)


def _which(command: str) -> str:
    found = subprocess.run(["which", command], capture_output=True, text=True, check=True)
    return found.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=_name)
def test_bash_blocks_run_as_written(page: Path, tmp_path: Path) -> None:
    _stand_ins(tmp_path / "bin")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        # One device, as a newcomer has; the pages speak of no more.
        "XLA_FLAGS": "",
    }
    script = "\n".join(blocks(page))
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", script], cwd=scratch, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, f"{_name(page)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "AGENTS.md"], ids=_name)
def test_links_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    assert not [t for t in targets if "://" not in t and not (page.parent / t).exists()]


def test_every_page_is_in_the_navigation() -> None:
    entries = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    listed = [page for entry in entries for page in entry.values()]
    assert {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")} <= set(listed)
