"""A tiny model with random weights, scaled so that the next token hangs on all before it and is far from equally likely."""

import jax
import pytest

from telamon.config.load import load_run
from telamon.models.weights import Model


@pytest.fixture(scope="session")
def model():
    return Model(load_run(overrides=["model.preset=tiny-qwen3", "model.vocab_size=64"]).config.model.spec())


@pytest.fixture(scope="session")
def weights(model):
    weights = jax.jit(model.init)(jax.random.key(0))
    weights["embedding"] *= 10.0
    for block in weights["stacks"]["0"]["blocks"].values():
        block["mixer"]["query_norm"]["scale"] *= 3.0
        block["mixer"]["out"] *= 20.0
        block["ffn"]["down"] *= 20.0
    return weights
