"""The demonstration of a real model, with a tiny one in its place: every step runs, and the download is left out."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_gguf as tiny
import tokenizers as hf

ROOT = Path(__file__).parent.parent
CHAT = Path(__file__).parent / "reference" / "chat"


@pytest.mark.slow
def test_a_gguf_file_is_imported_talked_with_measured_and_exported(tmp_path: Path):
    file = _chat_model(tmp_path / "tiny.gguf")
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "demo_smollm2.py", file],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    steps = [line.split()[2] for line in done.stdout.splitlines() if line.startswith("$ telamon ")]
    assert steps == ["import", "chat", "perplexity", "export"]
    assert "perplexity " in done.stdout and "exported/smollm2: a llama with 2 layers" in done.stdout
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= {
        path.name for path in (tmp_path / "exported" / "smollm2").iterdir()
    }


def test_a_file_that_is_not_there_ends_it_at_once(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "demo_smollm2.py", "absent.gguf"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "there is no absent.gguf" in done.stderr and "chat" not in done.stdout


def _chat_model(path: Path) -> Path:
    """A llama of two layers with a tokenizer and template of ours."""
    layout = json.loads((CHAT / "tokenizers" / "chatml" / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = layout["model"]["vocab"]
    special = {token["content"] for token in layout["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    assert hf.Tokenizer.from_str(json.dumps(layout)).get_vocab_size() == len(tokens)
    metadata = tiny.sizes("llama", context_length=512) | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in layout["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": vocab["<|im_start|>"],
        "tokenizer.ggml.eos_token_id": vocab["<|im_end|>"],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": (CHAT / "templates" / "chatml.jinja").read_text(encoding="utf-8"),
    }
    weights = tiny.model("llama")
    weights["token_embd.weight"] = np.random.default_rng(1).normal(size=(len(tokens), tiny.D)).astype(np.float32)
    return tiny.write(path, "llama", metadata, weights)
