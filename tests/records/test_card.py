"""Figures of models whose sums are done by hand."""

from typing import Any

import pytest
import tiny

from telamon.config.load import load_run
from telamon.layers.mlp import GatedMLPConfig
from telamon.models.llama4 import Llama4Config
from telamon.models.mixtral import MixtralConfig
from telamon.models.spec import ModelSpec
from telamon.models.weights import Model
from telamon.records.card import SERVING_BYTES, _memory, experts_in_words, layers_in_words
from telamon.train.job import model_flops

SMALL: dict[str, Any] = {"vocab_size": 11, "d_model": 8, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 2, "d_ff": 16}


@pytest.mark.parametrize("tied", [True, False])
def test_flops_come_from_the_real_tree(tied):
    """2 layers, V 11, D 8, F 16, 4 query heads of 2: 6 x 1,280 FLOPs a token, head tied or not, and 6 L T d of attention."""
    assert model_flops(tiny.model(**SMALL, tie_embeddings=tied), seq_len=16) == 7680 + 6 * 2 * 16 * 8


def test_layers_within_chunks_count_and_keep_what_a_chunk_has():
    """2 layers of 4 heads of 2, of which one has chunks of 4: in rows of 16, 4 x 4²/2 pairs and 16²/2, at 12 FLOPs a pair and feature.

    Of 8,192 tokens the first keeps 4 keys and values of 2 x 2, the second all.
    """
    model = Model(Llama4Config(**SMALL, d_expert=16, n_experts=4, chunk=4, layer_pattern="CN").spec())
    assert model_flops(model, seq_len=16) == 6 * model.matmul_parameters + 12 * 8 * (4 * 4**2 / 2 + 16**2 / 2) / 16
    memory = _memory(model)
    assert (memory.cache_served, memory.cache_kept) == (SERVING_BYTES * 8 * (4 + 8192), SERVING_BYTES * 8 * 2 * 8192)
    assert (memory.cache_per_token, memory.cache_per_token_beyond) == (SERVING_BYTES * 8 * 2, SERVING_BYTES * 8)


def mixture(**sizes: Any) -> Model:
    """4 experts of 16, of which a token goes to two, beside one that all tokens share."""
    spec: ModelSpec = MixtralConfig(**SMALL, n_experts=4, top_k=2, window=None, **sizes).spec()
    shared = {"shared": GatedMLPConfig(d_ff=16)}
    blocks = [block.model_copy(update={"ffn": block.ffn.model_copy(update=shared)}) for block in spec.blocks]
    return Model(spec.model_copy(update={"blocks": tuple(blocks)}))


def test_a_mixture_counts_all_experts_and_a_token_those_it_goes_to():
    """Beside 2 layers of attention and norms (208 each) and 96 of table and last norm, 2 x (5 MLPs of 384 and a router of 32) = 3,904: 4,416.

    A token meets 3 of the 5 MLPs: 2 x 2 x 384 = 1,536 fewer. FLOPs are of those, and of the table once, tied or not.
    """
    model = mixture(tie_embeddings=True)
    assert (model.parameter_count, model.active_parameters) == (4416, 2880)
    untied = mixture(tie_embeddings=False)
    assert (untied.parameter_count, untied.active_parameters) == (4416 + 88, 2880 + 88)
    for counted in (model, untied):
        assert counted.matmul_parameters == 2880
        assert model_flops(counted, seq_len=16) == 6 * 2880 + 6 * 2 * 16 * 8


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llama2-7b", "32: 32 over all before"),
        ("mistral-7b-v0.1", "32: 32 within the last 4,096 tokens"),
        ("gemma2-2b", "26: 13 times (1 within the last 4,096 tokens, 1 over all before)"),
        ("olmo3-7b", "32: 8 times (3 within the last 4,096 tokens, 1 over all before)"),
        ("deepseek-v3-671b", "61: 61 over all before"),  # of two stacks, which differ in the ffn alone
        ("gpt-oss-20b", "24: 12 times (1 within the last 128 tokens, 1 over all before)"),
        ("llama4-scout", "48: 12 times (3 within chunks of 8,192 tokens, 1 over all before)"),
        (
            "gemma3-4b",
            "34: 5 times (5 within the last 1,024 tokens, 1 over all before), 4 within the last 1,024 tokens",
        ),
    ],
)
def test_layers_in_words(name, words):
    spec: ModelSpec = load_run(overrides=[f"model.preset={name}"]).config.model.spec()
    assert layers_in_words(spec) == words


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llama2-7b", None),
        ("mixtral-8x7b", "8 of width 14,336 in 32 of 32 layers; a token goes to 2"),
        ("deepseek-v3-671b", "256 of width 2,048 in 58 of 61 layers; a token goes to 8, and to one of width 2,048 that all share"),
        ("llama4-maverick", "128 of width 8,192 in 24 of 48 layers; a token goes to 1, and to one of width 8,192 that all share"),
    ],
)
def test_experts_in_words(name, words):
    spec: ModelSpec = load_run(overrides=[f"model.preset={name}"]).config.model.spec()
    assert experts_in_words(spec) == words
