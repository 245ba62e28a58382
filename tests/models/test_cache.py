"""Prefill and decoding through the cache equal the whole forward."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from telamon.layers.parts import LayerCache
from telamon.models.decoder import Cache, Numerics
from telamon.models.weights import Model

LENGTH = 24
MODEL = tiny.model("qwen3")


@pytest.fixture(scope="module")
def weights() -> Any:
    return tiny.weights(MODEL)


@jax.jit
def _step(weights: Any, batch: dict[str, jax.Array], cache: Cache) -> tuple[jax.Array, Cache]:
    decoder = MODEL.bind(weights)
    output = decoder(batch["tokens"], positions=batch["positions"], segments=batch["segments"], cache=cache)
    assert output.cache is not None
    return decoder.logits(output.hidden), output.cache


@jax.jit
def _whole(weights: Any, batch: dict[str, jax.Array]) -> jax.Array:
    return tiny.logits(MODEL.bind(weights), batch)


def _empty(weights: Any, model: Model = MODEL, *, batch: int) -> Cache:
    return model.bind(weights).init_cache(batch=batch, length=LENGTH)


def _through_cache(weights: Any, batch: dict[str, Any], chunks: Sequence[int]) -> np.ndarray:
    """Logits of a batch read in chunks of these numbers of tokens."""
    cache, parts, start = _empty(weights, batch=len(batch["tokens"])), [], 0
    for size in chunks:
        logits, cache = _step(weights, {name: x[:, start : start + size] for name, x in batch.items()}, cache)
        parts.append(np.asarray(logits))
        start += size
    assert int(cache.length) == start == batch["tokens"].shape[1]
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize("chunks", [[12], [3, 3, 3, 3], [5, 3, *[1] * 4], [1] * 12], ids=str)
def test_every_position_equals_the_whole_forward(weights: Any, chunks: list[int]):
    batch = tiny.batch([[12], [12]], length=12)
    np.testing.assert_allclose(_through_cache(weights, batch, chunks), _whole(weights, batch), atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_prompts_of_unequal_length_decode_as_they_would_alone(weights: Any, side: str):
    """Prompts of 6, 3 and 1 tokens padded to 6, then 4 tokens one by one; the places of right pads stay unseen for ever."""
    alone = [tiny.batch([[size + 4]], length=size + 4, seed=size) for size in (6, 3, 1)]
    together = {name: np.full((3, 10), 7 if name == "tokens" else 0, np.int32) for name in ("tokens", "positions", "segments")}
    for row, (size, single) in enumerate(zip((6, 3, 1), alone, strict=True)):
        prompt = slice(6 - size, 6) if side == "left" else slice(0, size)
        for name, x in together.items():
            x[row, prompt], x[row, 6:] = single[name][0, :size], single[name][0, size:]
    logits = _through_cache(weights, together, [6, 1, 1, 1, 1])
    for row, (size, single) in enumerate(zip((6, 3, 1), alone, strict=True)):
        expected = np.asarray(_whole(weights, single))[0]
        prompt = logits[row, 6 - size : 6] if side == "left" else logits[row, :size]
        np.testing.assert_allclose(np.concatenate([prompt, logits[row, 6:]]), expected, atol=1e-5)


def test_a_cache_says_how_far_it_is_written(weights: Any):
    batch = tiny.batch([[5]], length=5)
    _, cache = _step(weights, batch, _empty(weights, batch=1))
    assert int(cache.length) == 5
    np.testing.assert_array_equal(cache.segments[0], [1] * 5 + [0] * (LENGTH - 5))
    np.testing.assert_array_equal(cache.positions[0, :5], range(5))
    # Two stacked layers, one row, two kv heads, eight features.
    assert jax.tree.leaves(cache.layers)[0].shape == (2, 1, 2, LENGTH, 8)


def test_a_layer_writes_its_own_part_of_the_stack_alone():
    stacked = {"k": jnp.zeros((3, 1, 2, 6, 4), jnp.bfloat16), "v": jnp.ones((3, 1, 2, 6, 4), jnp.bfloat16)}
    new = {"k": jnp.full((1, 2, 2, 4), 5.0)}
    written = LayerCache(stacked, jnp.int32(1)).write(new, dim=2, index=jnp.int32(3))
    expected = np.zeros((3, 1, 2, 6, 4))
    expected[1, :, :, 3:5] = 5
    np.testing.assert_array_equal(written.stacked["k"].astype(jnp.float32), expected)
    np.testing.assert_array_equal(written["k"].astype(jnp.float32), expected[1])
    assert written.stacked["k"].dtype == jnp.bfloat16
    assert written.stacked["v"] is stacked["v"]


def test_a_cache_is_of_the_type_of_the_activations(weights: Any):
    model = tiny.model("qwen3", numerics=Numerics(dtype="bfloat16"))
    assert {leaf.dtype for leaf in jax.tree.leaves(_empty(weights, model, batch=1).layers)} == {jnp.dtype("bfloat16")}
