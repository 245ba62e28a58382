"""The splash kernels, run by Pallas' interpreter, beside the plain reference: values and gradients, the latter for a cotangent
that is not 1."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from telamon.config.schema import AXES
from telamon.errors import ConfigError
from telamon.kernels.attention import Places, Scores, reference_attention, splash, splash_jax, splash_tokamax, visible
from telamon.kernels.attention.pick import Request, choose
from telamon.models.decoder import REMAT_POLICIES
from telamon.parallel.target import Target

N, K, H = 4, 2, 16
T = 300  # no multiple of 128: padded to three blocks
SINKS = jnp.array([0.5, -1.0, 2.0, 0.0])


def _places(rows: list[list[tuple[int, int]]]) -> Places:
    """From (segment, length) of the documents of each row."""
    segments = np.array([[segment for segment, size in row for _ in range(size)] for row in rows], np.int32)
    positions = np.array([[i for _, size in row for i in range(size)] for row in rows], np.int32)
    return Places(jnp.asarray(positions), jnp.asarray(segments))


PACKED = _places([[(1, 100), (2, 37), (3, 163)], [(0, 20), (1, 170), (2, 64), (0, 46)]])


def _arrays(B: int, T: int) -> tuple[jax.Array, ...]:
    """Queries, keys, values, and a cotangent of their size."""
    rng = np.random.default_rng(0)
    shapes = (B, T, N, H), (B, T, K, H), (B, T, K, H), (B, T, N, H)
    return tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _results(function: Callable[..., jax.Array], scores: Scores, places: Places, q, k, v, d_out, sinks) -> tuple[jax.Array, ...]:
    """Output, and gradients of queries, keys, values and sinks."""
    out, pull = jax.vjp(lambda q, k, v, sinks: function(q, k, v, scores=scores, places=places, sinks=sinks), q, k, v, sinks)
    return out, *(x for x in pull(2.5 * d_out) if x is not None)


def _kernel(q, k, v, *, scores: Scores, places: Places, sinks):
    return splash.run(q, k, v, queries=places, keys=places, scores=scores, aligned=True, sinks=sinks, interpret=True)


def _reference(q, k, v, *, scores: Scores, places: Places, sinks):
    mask = visible(places, places, scores.window, scores.chunk)
    return reference_attention(q, k, v, mask, scores=scores, sinks=sinks)


@pytest.fixture(params=[splash_tokamax, splash_jax], ids=["tokamax", "jax"])
def made(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Each of the two kernels in turn."""
    monkeypatch.setattr(splash_tokamax, "installed", lambda: request.param is splash_tokamax)
    return request.param


@pytest.mark.parametrize("scores", [Scores(0.3, softcap=2.0, window=40), Scores(0.25, chunk=50)], ids=["cap and window", "chunks"])
def test_both_kernels_equal_the_reference(made: ModuleType, scores: Scores):
    """Packed documents of unequal length, padding on both sides, two query heads to a kv head; with sinks where there are some."""
    *arrays, d_out = _arrays(2, T)
    sinks = SINKS if made is splash_tokamax else None
    # Another function for each of the two: to a function seen before, JAX gives the program made then.
    ours, theirs = (_results(f, scores, PACKED, *arrays, d_out, sinks) for f in (functools.partial(_kernel), _reference))
    assert len(ours) == (5 if made is splash_tokamax else 4)
    for name, x, y in zip(["out", "q", "k", "v", "sinks"], ours, theirs, strict=False):
        np.testing.assert_allclose(x, y, atol=1e-4 if name == "sinks" else 3e-5, err_msg=name)
    np.testing.assert_array_equal(np.asarray(ours[0])[np.asarray(PACKED.segments) == 0], 0.0)


def test_both_kernels_take_values_of_another_width(made: ModuleType):
    """Values of half the keys' width, as in latent attention."""
    q, k, v, d_out = _arrays(2, T)
    ours, theirs = (
        _results(f, Scores(0.3), PACKED, q, k, v[..., : H // 2], d_out[..., : H // 2], None)
        for f in (functools.partial(_kernel), _reference)
    )
    for name, x, y in zip(["out", "q", "k", "v"], ours, theirs, strict=True):
        np.testing.assert_allclose(x, y, atol=3e-5, err_msg=name)


def test_bfloat16_stays_near_float32():
    """Scores and sums are float32; queries are rounded once more than in the reference, by the scale."""
    arrays = _arrays(2, T)
    small = [x.astype(jnp.bfloat16) for x in arrays]
    ours = _results(_kernel, Scores(0.3), PACKED, *small, SINKS)
    exact = _results(_reference, Scores(0.3), PACKED, *(x.astype(jnp.float32) for x in small), SINKS)
    for name, x, y in zip(["out", "q", "k", "v", "sinks"], ours, exact, strict=True):
        assert x.dtype == (jnp.float32 if name == "sinks" else jnp.bfloat16)
        error = np.linalg.norm(np.asarray(x, np.float32) - np.asarray(y)) / np.linalg.norm(np.asarray(y))
        assert error < 1.5e-2, (name, error)


@pytest.mark.parametrize(("length", "window"), [(6, 3), (2048, 512)])
def test_a_window_of_w_is_w_keys(length: int, window: int):
    """With equal scores a query gives the mean index of what it sees: of max(0, i - w + 1) to i, and so of 15 and 917,760 pairs."""
    index = jnp.arange(length, dtype=jnp.float32)
    places = Places(index.astype(jnp.int32)[None], jnp.ones((1, length), jnp.int32))
    q, k = jnp.zeros((1, length, 1, 8)), jnp.zeros((1, length, 1, 8))
    v = jnp.broadcast_to(index[None, :, None, None], (1, length, 1, 8))
    out = jax.jit(functools.partial(_kernel, scores=Scores(1.0, window=window), sinks=None))(q, k, v, places=places)[0, :, 0, 0]
    first = np.maximum(0, np.arange(length) - window + 1)
    assert (np.arange(length) - first + 1).sum() == {6: 15, 2048: 917_760}[length]
    np.testing.assert_allclose(out, (first + np.arange(length)) / 2, rtol=1e-5)


def test_documents_of_a_row_do_not_see_each_other():
    """A changed document leaves the others exactly alone, and copies of one document give the same."""
    places = _places([[(1, 75), (2, 75), (3, 75), (4, 75)]])
    copy = [jnp.tile(x, (1, 4, 1, 1)) for x in _arrays(1, 75)]
    run = functools.partial(_results, _kernel, Scores(0.3), places)
    out, *gradients = run(*copy, None)
    for x in (out, *gradients):
        for document in range(1, 4):
            np.testing.assert_allclose(x[:, document * 75 : (document + 1) * 75], x[:, :75], atol=1e-5)
    changed, *_ = run(*(x.at[:, :75].multiply(3.0) for x in copy), None)
    np.testing.assert_array_equal(changed[:, 75:], out[:, 75:])
    assert np.abs(changed[:, :75] - out[:, :75]).max() > 0.1


def test_each_device_of_a_mesh_runs_the_kernel_on_its_rows_and_heads():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(1, 2, 1, 1, 1, 2), AXES, axis_types=(AxisType.Auto,) * 6)
    *arrays, d_out = _arrays(2, T)
    with jax.set_mesh(mesh):
        ours = _results(_kernel, Scores(0.3), PACKED, *arrays, d_out, SINKS)
    for name, x, y in zip(
        ["out", "q", "k", "v", "sinks"], ours, _results(_reference, Scores(0.3), PACKED, *arrays, d_out, SINKS), strict=True
    ):
        np.testing.assert_allclose(x, y, atol=1e-4 if name == "sinks" else 3e-5, err_msg=name)


@pytest.mark.parametrize(("remat", "times"), [("full", 2), ("dots", 1)])
def test_what_the_kernel_gives_is_kept_where_products_are(made: ModuleType, remat: str, times: int):
    q, k, v, _ = _arrays(2, T)
    layer = jax.checkpoint(functools.partial(_kernel, scores=Scores(0.3), places=PACKED, sinks=None), policy=REMAT_POLICIES[remat])
    program = str(jax.make_jaxpr(jax.grad(lambda q: jnp.sum(layer(jnp.sin(q), k, v))))(q))
    assert program.count("name=splash_mha_fwd") == times


def _request(**changes: Any) -> Request:
    target = Target("tpu", "TPU v5 lite", (("data", 2), ("fsdp", 2), ("context", 1), ("tensor", 2)))
    return Request(
        **{"target": target, "B": 8, "T": T, "S": T, "N": N, "K": K, "H": H, "dtype": "bfloat16", "scores": Scores(0.3)} | changes
    )


def test_a_tpu_takes_it_and_it_says_what_it_cannot(monkeypatch: pytest.MonkeyPatch):
    assert (choose(_request()).path, choose(_request()).refused) == ("splash", ())
    assert choose(_request(), "chunked").path == "chunked"
    long = Target("tpu", "TPU v5 lite", (("context", 2),))
    for changes, reason in [
        ({"aligned": False}, "the keys of a cache"),
        ({"dtype": "float16"}, "not in float16"),
        ({"target": long}, "split over 2 devices"),
        ({"B": 6}, "6 rows do not split evenly over 4 devices"),
        ({"K": 1}, "1 kv heads do not split evenly over 2 devices"),
    ]:
        assert reason in (splash.refusal(_request(**changes)) or "")
        assert choose(_request(**changes)).path == "chunked"
        with pytest.raises(ConfigError, match=reason):
            choose(_request(**changes), "splash")
    monkeypatch.setattr(splash_tokamax, "installed", lambda: False)
    assert splash.refusal(_request()) is None and "not installed" in (splash.refusal(_request(sinks=True)) or "")
    with pytest.raises(ConfigError, match=r"train\.attention=splash is not for cpu"):
        choose(_request(target=Target("cpu", "", ())), "splash")
