"""Train two small tokenizers with sentencepiece, and record their vocabularies as GGUF holds them, with the ids they give.

    ENV/bin/pip install sentencepiece
    ENV/bin/python tests/reference/make_sentencepiece.py

`llama` puts a space before a text, as Llama 2's does; `gemma` does not, and has tokens of several spaces or lines.
"""
# pyright: reportMissingImports=false

import io
import json
from pathlib import Path
from typing import Any

import sentencepiece

ROOT = Path(__file__).parent.parent.parent
FOLDER = Path(__file__).parent / "vocabularies"
SPACE = "▁"
ADDED = {"llama": [], "gemma": [SPACE * 2, SPACE * 3, SPACE * 4, "\n\n"]}
TEXTS = [
    "Train language models in pure Python, from a laptop to a cluster.",
    "  two leading spaces,   three within, and trailing  ",
    "def f(x):\n    return x ** 2\n\n\n\nclass A:\n\ty = [1, 20, 300]\n",
    "Zażółć 数学 👩‍👧 \x00 é\t\ufeff",
    "a  b   c    d     e",
    " ",
    "",
    "\n\n\nx",
    "the <s> and </s> of a text that only spells them: <0x41> <unk>",
]


def train(added: list[str], *, prefix: bool) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter((ROOT / "README.md").read_text(encoding="utf-8").splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=560,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        user_defined_symbols=added,
        split_digits=True,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def kind(model: sentencepiece.SentencePieceProcessor, i: int, added: list[str]) -> int:
    """What GGUF calls the token's type: 1 normal, 2 unknown, 3 control, 4 added, 6 a byte."""
    if model.id_to_piece(i) in added:
        return 4
    return 2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1


def record(name: str) -> dict[str, Any]:
    added = ADDED[name]
    model = train(added, prefix=name == "llama")
    pieces = [model.id_to_piece(i) for i in range(model.vocab_size())]
    return {
        "sentencepiece": sentencepiece.__version__,
        "metadata": {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.tokens": [piece.replace(SPACE, " ") if piece in added else piece for piece in pieces],
            "tokenizer.ggml.scores": [float(model.get_score(i)) for i in range(len(pieces))],
            "tokenizer.ggml.token_type": [kind(model, i, added) for i in range(len(pieces))],
            "tokenizer.ggml.unknown_token_id": model.unk_id(),
            "tokenizer.ggml.bos_token_id": model.bos_id(),
            "tokenizer.ggml.eos_token_id": model.eos_id(),
            "tokenizer.ggml.add_space_prefix": name == "llama",
        },
        "texts": [{"text": text, "ids": model.encode(text), "decoded": model.decode(model.encode(text))} for text in TEXTS],
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in ADDED:
        (FOLDER / f"{name}.json").write_text(json.dumps(record(name), ensure_ascii=False) + "\n", encoding="utf-8")
