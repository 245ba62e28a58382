"""Figures of models whose sums are done by hand."""

from typing import Any

import pytest
import tiny

from telamon.config.load import load_run
from telamon.models.spec import ModelSpec
from telamon.records.card import layers_in_words
from telamon.train.job import model_flops

SMALL: dict[str, Any] = {"vocab_size": 11, "d_model": 8, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 2, "d_ff": 16}


@pytest.mark.parametrize("tied", [True, False])
def test_flops_come_from_the_real_tree(tied):
    """2 layers, V 11, D 8, F 16, 4 query heads of 2: 6 x 1,280 FLOPs a token, head tied or not, and 6 L T d of attention."""
    assert model_flops(tiny.model(**SMALL, tie_embeddings=tied), seq_len=16) == 7680 + 6 * 2 * 16 * 8


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llama2-7b", "32: 32 over all before"),
        ("mistral-7b-v0.1", "32: 32 within the last 4,096 tokens"),
        ("gemma2-2b", "26: 13 times (1 within the last 4,096 tokens, 1 over all before)"),
        ("olmo3-7b", "32: 8 times (3 within the last 4,096 tokens, 1 over all before)"),
        (
            "gemma3-4b",
            "34: 5 times (5 within the last 1,024 tokens, 1 over all before), 4 within the last 1,024 tokens",
        ),
    ],
)
def test_layers_in_words(name, words):
    spec: ModelSpec = load_run(overrides=[f"model.preset={name}"]).config.model.spec()
    assert layers_in_words(spec) == words
