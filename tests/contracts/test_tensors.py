"""The weight tables: in and out again is bit-equal, and no layer is forgotten or taken twice."""

import re

import checkpoints
import numpy as np
import pytest
from reference import fixtures

from telamon.models.hf import config_from_hf
from telamon.models.weights import Model, flatten

STORED = [name for name in checkpoints.names() if not fixtures.load(name).meta["same_as"]]


@pytest.mark.parametrize("name", STORED)
def test_in_and_out_again_is_bit_equal(name: str):
    """Names, shapes, types and values, through the model's own layout."""
    fixture = fixtures.load(name)
    config = checkpoints.config(fixture)
    model = Model(config.spec())
    arrays = checkpoints.tensors_of(fixture, config)
    assert {tensor.name: tensor.shape for tensor in config.tensors(model)} == {name: array.shape for name, array in arrays.items()}
    for tensor in config.tensors(model):
        back = tensor.to_hf(tensor.to_ours(arrays[tensor.name]))
        assert back.dtype == arrays[tensor.name].dtype
        assert back.shape == arrays[tensor.name].shape
        assert back.tobytes() == arrays[tensor.name].tobytes(), tensor.name


@pytest.mark.parametrize("name", STORED)
def test_every_value_of_the_model_comes_from_the_file(name: str):
    config = checkpoints.config(fixtures.load(name))
    model = Model(config.spec())
    filled = {path: np.zeros(info.shape, int) for path, info in flatten(model.info).items()}
    for tensor in config.tensors(model):
        for part in tensor.parts:
            filled[part.path][part.index] += 1
    assert all((count == 1).all() for count in filled.values())


def test_thirteen_layers_in_a_pattern_of_six():
    """Two whole patterns and a remainder of one: each layer's tensors occur once, under its own number."""
    raw = fixtures.load("gemma3").config | {"num_hidden_layers": 13, "layer_types": None}
    config = config_from_hf(raw)
    model = Model(config.spec())
    assert [(stack.repeats, len(stack.pattern)) for stack in model.spec.stacks] == [(2, 6), (1, 1)]
    layers = [int(number[1]) for tensor in config.tensors(model) if (number := re.search(r"layers\.(\d+)\.self_attn\.q_proj", tensor.name))]
    assert layers == list(range(13))
    windows = [block.mixer.attention_window for block in model.spec.blocks]
    assert [layer for layer, window in enumerate(windows) if window is None] == [5, 11]


def test_spare_rows_of_the_tables_stay_out_of_files():
    """A vocabulary of 11 held in 16 rows: files have 11, spare rows are zero."""
    raw = fixtures.load("llama-gqa").config | {"vocab_size": 11}
    for tied in (True, False):
        config = config_from_hf(raw | {"tie_word_embeddings": tied}).model_copy(update={"vocab_multiple": 16})
        model = Model(config.spec())
        tables = {tensor.name: tensor for tensor in config.tensors(model) if tensor.name in ("model.embed_tokens.weight", "lm_head.weight")}
        assert len(tables) == (1 if tied else 2)
        for tensor in tables.values():
            assert tensor.shape == (11, config.d_model)
            table = np.random.default_rng(0).standard_normal(tensor.shape).astype(np.float32)
            [ours] = tensor.to_ours(table)
            assert sorted(ours.shape) == [16, config.d_model]
            assert not np.moveaxis(ours, ours.shape.index(16), 0)[11:].any()
            assert (tensor.to_hf([ours]) == table).all()
