"""Layers as stacks of a repeating pattern, each under one scan."""

import jax
import numpy as np
import pytest
import reference_numpy
import tiny

from telamon.layers.attention import AttentionConfig
from telamon.layers.mlp import GatedMLPConfig
from telamon.layers.rope import RopeConfig
from telamon.models.spec import BlockSpec, ModelSpec
from telamon.models.weights import Model, flatten

BATCH = tiny.batch([[7, 9], [12]], length=16)


def _theta(letter: str) -> float:
    return 50.0 if letter == "c" else 1e4


def _block(letter: str) -> BlockSpec:
    """Blocks that differ in shape ("b"), in a constant ("c"), and not at all (the same letter)."""
    mixer = AttentionConfig(n_heads=4, n_kv_heads=2, head_dim=8, rope=RopeConfig(theta=_theta(letter)))
    return BlockSpec(mixer=mixer, ffn=GatedMLPConfig(d_ff=24 if letter == "b" else 16))


def _spec(letters: str) -> ModelSpec:
    return ModelSpec(vocab_size=64, d_model=16, blocks=tuple(_block(letter) for letter in letters), tie_embeddings=True)


@pytest.mark.parametrize(
    ("letters", "expected"),
    [
        ("a", [("a", 1)]),
        ("a" * 24, [("a", 24)]),
        ("aaa" + "b" * 58, [("a", 3), ("b", 58)]),
        # Five local to one global, 26 layers: four times the pattern, and a rest of two local ones.
        ("aaaaab" * 4 + "aa", [("aaaaab", 4), ("a", 2)]),
        ("aaaaab" * 2 + "a", [("aaaaab", 2), ("a", 1)]),
        ("abababab", [("ab", 4)]),
        ("abc", [("a", 1), ("b", 1), ("c", 1)]),
    ],
)
def test_blocks_are_run_length_encoded(letters: str, expected: list[tuple[str, int]]):
    stacks = _spec(letters).stacks
    assert [(stack.pattern, stack.repeats) for stack in stacks] == [(tuple(map(_block, pattern)), n) for pattern, n in expected]


def test_every_layer_is_in_the_stacks_once_and_in_order():
    rng = np.random.default_rng(0)
    for _ in range(50):
        letters = "".join(rng.choice(list("aab"), size=rng.integers(1, 20)))
        stacks = _spec(letters).stacks
        assert [block for stack in stacks for block in stack.pattern * stack.repeats] == [_block(letter) for letter in letters]


@pytest.mark.parametrize("letters", ["ababa", "acacb"])
def test_scans_equal_a_loop_over_layers(letters: str):
    """Layer after layer in NumPy: patterns and rests, blocks that differ in shape and blocks that differ in a constant."""
    model = Model(_spec(letters))
    weights = tiny.weights(model)
    ours = jax.jit(lambda weights: tiny.logits(model.bind(weights), BATCH))(weights)
    places = [
        (f"stacks.{number}.blocks.{place}.", repeat)
        for number, stack in enumerate(model.spec.stacks)
        for repeat in range(stack.repeats)
        for place in range(len(stack.pattern))
    ]
    layers = [(*place, _theta(letter)) for place, letter in zip(places, letters, strict=True)]
    for row in range(2):
        where = {name: BATCH[name][row] for name in ("tokens", "positions", "segments")}
        expected = reference_numpy.decoder_logits(flatten(weights), **where, layers=layers, eps=1e-6)
        np.testing.assert_allclose(ours[row], expected, atol=1e-4)


def test_the_program_does_not_grow_with_depth():
    def lines(depth: int) -> int:
        model = tiny.model(n_layers=depth)
        lowered = jax.jit(lambda weights: tiny.logits(model.bind(weights), BATCH)).lower(model.abstract())
        return len(lowered.as_text().splitlines())

    assert lines(24) == lines(3)
