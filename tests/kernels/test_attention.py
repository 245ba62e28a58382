import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_numpy

from telamon.kernels.attention import Places, Scores, attention, reference_attention, visible
from telamon.kernels.attention.chunked import _ACCELERATOR, _CPU
from telamon.kernels.attention.chunked import _layout as _layout_of_blocks

N, K, H = 4, 2, 8
SCALE = H**-0.5


def _layout(T: int) -> tuple[Any, Any]:
    """Positions and segments of four rows: one document; three packed; padded left; packed and padded right."""
    cut, pad = T // 3, T // 4
    lengths = [[(1, T)], [(1, cut), (2, T - 2 * cut), (3, cut)], [(0, pad), (1, T - pad)], [(1, cut), (2, T - cut - pad), (0, pad)]]
    positions, segments = np.zeros((2, len(lengths), T), np.int32)
    for row, documents in enumerate(lengths):
        start = 0
        for segment, size in documents:
            positions[row, start : start + size] = np.arange(size)
            segments[row, start : start + size] = segment
            start += size
    return positions, segments


def _arrays(B: int, T: int, S: int, *, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in ((B, T, N, H), (B, S, K, H), (B, S, K, H)))
    return jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)


def _mask(positions: np.ndarray, segments: np.ndarray) -> np.ndarray:
    return np.stack([reference_numpy.sees(p, s) for p, s in zip(positions, segments, strict=True)])


def _blockwise(q, k, v, positions, segments):
    return attention(
        q,
        k,
        v,
        queries=Places(positions, segments),
        keys=Places(positions, segments),
        scores=Scores(SCALE),
        aligned=True,
    )


def _visible(positions, segments):
    return visible(Places(positions, segments), Places(positions, segments))


@functools.partial(jax.jit, static_argnums=0)
def _value_and_gradients(function: Callable[..., jax.Array], q: jax.Array, k: jax.Array, v: jax.Array, *rest: Any) -> tuple[jax.Array, ...]:
    out, pull = jax.vjp(lambda q, k, v: function(q, k, v, *rest), q, k, v)
    cotangent = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
    return out, *pull(cotangent.astype(out.dtype))


def _reference(q, k, v, mask):
    return reference_attention(q, k, v, mask, scores=Scores(SCALE))


def test_the_reference_equals_loops_in_float64():
    positions, segments = _layout(9)
    q, k, v = _arrays(4, 9, 9)
    mask = _mask(positions, segments)
    out = _reference(q, k, v, jnp.asarray(mask))
    for row in range(4):
        q_row, k_row, v_row = (np.asarray(x[row], np.float64) for x in (q, k, v))
        expected = reference_numpy.attention(q_row, k_row, v_row, mask[row])
        np.testing.assert_allclose(out[row], expected, atol=1e-6)


def test_visible_keys_are_earlier_ones_of_the_own_document():
    positions, segments = _layout(9)
    seen = _visible(positions, segments)
    np.testing.assert_array_equal(seen, _mask(positions, segments))


@pytest.mark.parametrize("T", [1, 127, 128, 129, 300, 700])
def test_blocks_equal_the_reference_in_value_and_gradient(T: int):
    """Packed, padded on the left and on the right; below, at and above a block's size, and with several blocks a span."""
    positions, segments = _layout(T)
    q, k, v = _arrays(4, T, T)
    mask = _visible(positions, segments)
    expected = _value_and_gradients(_reference, q, k, v, mask)
    for name, ours, theirs in zip("oqkv", _value_and_gradients(_blockwise, q, k, v, positions, segments), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("width", [5, 12])
def test_values_may_be_of_another_width_than_keys(width: int):
    """Narrower and wider, over several blocks: the first features of values of the keys' width, and of two such side by side."""
    positions, segments = _layout(300)
    q, k, v = _arrays(4, 300, 300)
    wide = jnp.concatenate([v, 2.0 * v], axis=-1)
    mask = _visible(positions, segments)

    def first(q, k, wide):
        halves = [_reference(q, k, half, mask) for half in jnp.split(wide, 2, axis=-1)]
        return jnp.concatenate(halves, axis=-1)[..., :width]

    def of_width(function, *rest):
        return lambda q, k, wide: function(q, k, wide[..., :width], *rest)

    expected = _value_and_gradients(first, q, k, wide)
    for function in (of_width(_blockwise, positions, segments), of_width(_reference, mask)):
        for name, ours, theirs in zip("oqkv", _value_and_gradients(function, q, k, wide), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(("T", "window", "pairs"), [(6, 3, 15), (6, 6, 21), (6, 100, 21), (2048, 512, 917_760)])
def test_a_window_of_w_is_w_keys(T: int, window: int, pairs: int):
    """Row i sees the keys max(0, i - w + 1) to i. One key too many would give 18 and 919,296 pairs."""
    places = Places(jnp.arange(T)[None], jnp.ones((1, T), jnp.int32))
    seen = np.asarray(visible(places, places, window)[0])
    assert seen.sum() == pairs
    for i in (0, 2, 3, T - 1):
        assert np.flatnonzero(seen[i]).tolist() == list(range(max(0, i - window + 1), i + 1))


SINKS = jnp.array([-1.0, 0.5, 4.0, 1.0])
"""For each query head; the third takes most of its queries' weight."""


@pytest.mark.parametrize(
    ("scores", "sinks"),
    [
        (Scores(0.3, softcap=2.0), SINKS),
        (Scores(0.5, window=40), None),
        (Scores(0.3, softcap=2.0, window=150), None),
        (Scores(0.5, chunk=64), SINKS),
        (Scores(0.5, window=70, chunk=100), SINKS),
    ],
    ids=str,
)
def test_every_rule_equals_the_reference_in_value_and_gradient(scores: Scores, sinks: jax.Array | None):
    """Over several blocks of queries, which for short windows and chunks slide over the keys; the cap bites on most scores."""
    T = 300
    positions, segments = _layout(T)
    places = Places(jnp.asarray(positions), jnp.asarray(segments))
    q, k, v = _arrays(4, T, T)
    mask = visible(places, places, scores.window, scores.chunk)

    def results(function: Callable[..., jax.Array]) -> Any:
        out, pull = jax.vjp(lambda q, k, v, sinks: function(q, k, v, sinks=sinks), 3.0 * q, k, v, sinks)
        d_q, d_k, d_v, d_sinks = pull(jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))
        return {"out": out, "q": d_q, "k": d_k, "v": d_v, "sinks": d_sinks}

    ours = jax.jit(lambda: results(functools.partial(attention, queries=places, keys=places, scores=scores, aligned=True)))()
    theirs = jax.jit(lambda: results(functools.partial(reference_attention, mask=mask, scores=scores)))()
    assert (ours["sinks"] is None) == (sinks is None)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), ours, theirs)


def test_blocks_are_compared_with_the_keys_in_reach_only():
    """At T 2048: 9/16 of all pairs when nothing limits the reach; of 256 keys in reach, at most 128 + 256 for each query."""
    pairs = {}
    for reach in (None, 256, 2000):
        layout = _layout_of_blocks(2048, 2048, _CPU, aligned=True, reach=reach)
        pairs[reach] = sum((span.stop - span.start) * span.keys for span in layout.spans)
    assert pairs == {None: 2048 * 2048 * 9 // 16, 256: 2048 * (128 + 256), 2000: 2048 * 2048 * 9 // 16}
    assert len(_layout_of_blocks(2048, 2048, _ACCELERATOR, aligned=True, reach=None).spans) == 2
    unaligned = _layout_of_blocks(16, 2048, _CPU, aligned=False, reach=256)
    assert [span.keys for span in unaligned.spans] == [2048]


def test_a_cap_is_applied_before_the_mask_and_after_the_scale():
    """One query of product 8 and one of 0 with a hidden key between: weights softmax(2 tanh([0.4 * 8 / 2, 0]))."""
    q, k, v = (
        jnp.full((1, 1, 1, 2), 2.0),
        jnp.array([[[[2.0, 2.0]], [[9.0, 9.0]], [[0.0, 0.0]]]]),
        jnp.array([[[[1.0, 0.0]], [[5.0, 5.0]], [[0.0, 1.0]]]]),
    )
    out = reference_attention(q, k, v, jnp.array([[[True, False, True]]]), scores=Scores(0.4, softcap=2.0))
    high = np.exp(2 * np.tanh(0.4 * 8 / 2))
    np.testing.assert_allclose(out[0, 0, 0], [high / (high + 1), 1 / (high + 1)], rtol=1e-6)


def test_bfloat16_gradients_stay_near_float32():
    """Softmax, normalisers and the sums over blocks are float32."""
    positions, segments = _layout(300)
    exact = _arrays(4, 300, 300)
    small = [x.astype(jnp.bfloat16) for x in exact]
    results = (_value_and_gradients(_blockwise, *x, positions, segments) for x in (small, exact))
    for name, ours, theirs in zip("oqkv", *results, strict=True):
        assert ours.dtype == jnp.bfloat16
        assert np.linalg.norm(ours.astype(jnp.float32) - theirs) < 2e-2 * np.linalg.norm(theirs), name


@pytest.mark.parametrize(
    ("scores", "sinks"),
    [(Scores(SCALE), None), (Scores(SCALE, window=30), SINKS), (Scores(SCALE, softcap=1.0, chunk=64), SINKS)],
    ids=str,
)
def test_queries_later_than_the_keys_given_read_a_cache(scores: Scores, sinks: jax.Array | None):
    """200 new tokens after 90 cached ones, of which the first 5 are padding; 30 slots are not written yet."""
    T, S, written = 200, 320, 90
    q, k, v = _arrays(2, T, S)
    q_positions = np.broadcast_to(np.arange(T) + written - 5, (2, T))
    q_segments = np.ones((2, T), np.int32)
    k_positions = np.broadcast_to(np.maximum(np.arange(S) - 5, 0), (2, S))
    k_segments = np.broadcast_to(((np.arange(S) >= 5) & (np.arange(S) < written + T)).astype(np.int32), (2, S))
    queries, keys = Places(jnp.asarray(q_positions), jnp.asarray(q_segments)), Places(jnp.asarray(k_positions), jnp.asarray(k_segments))
    out = jax.jit(lambda q, k, v: attention(q, k, v, queries=queries, keys=keys, scores=scores, aligned=False, sinks=sinks))(q, k, v)
    seen = visible(queries, keys, scores.window, scores.chunk)
    np.testing.assert_allclose(out, reference_attention(q, k, v, seen, scores=scores, sinks=sinks), atol=2e-6)


@pytest.mark.parametrize("T", [5, 150])
def test_a_query_that_sees_nothing_gives_zero_and_finite_gradients(T: int):
    q, k, v = _arrays(1, T, T)
    segments = np.zeros((1, T), np.int32)
    segments[0, 3:] = 1
    positions = np.maximum(np.arange(T)[None] - 3, 0)
    out, *gradients = _value_and_gradients(_blockwise, q, k, v, positions, segments)
    np.testing.assert_array_equal(out[0, :3], 0.0)
    assert np.abs(out[0, 3:]).min() > 0
    for gradient in gradients:
        assert np.isfinite(gradient).all()
        np.testing.assert_array_equal(gradient[0, :3], 0.0)


def test_a_changed_document_leaves_the_others_exactly_alone():
    positions, segments = _layout(300)
    q, k, v = _arrays(4, 300, 300)
    other = segments[1] != 2
    changed = [jnp.where(jnp.asarray(segments == 2)[:, :, None, None], 3 * x + 1, x) for x in (q, k, v)]
    run = jax.jit(_blockwise)
    before, after = run(q, k, v, positions, segments), run(*changed, positions, segments)
    np.testing.assert_array_equal(before[1][other], after[1][other])
    assert np.abs(before[1][~other] - after[1][~other]).max() > 0.1


def _temporary_bytes(function, T: int) -> int:
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, T, N, H), (1, T, K, H), (1, T, K, H))]
    ids = jax.ShapeDtypeStruct((1, T), jnp.int32)
    rest = [ids, ids] if function is _blockwise else [jax.ShapeDtypeStruct((1, T, T), jnp.bool_)]
    analysis = _value_and_gradients.lower(function, *shapes, *rest).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


def test_memory_of_value_and_gradient_grows_linearly():
    """Four times the tokens take about four times the memory; scores for all pairs take sixteen times."""
    at = {T: _temporary_bytes(_blockwise, T) for T in (512, 2048, 8192)}
    assert at[2048] < 6 * at[512]
    assert at[8192] < 6 * at[2048]
    reference = {T: _temporary_bytes(_reference, T) for T in (512, 2048)}
    assert reference[2048] > 12 * reference[512]
