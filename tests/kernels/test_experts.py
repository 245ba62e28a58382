"""Every path of the grouped matmul against a loop over experts in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telamon.kernels.experts import grouped_matmul
from telamon.kernels.experts.pick import PLATFORMS
from telamon.models.decoder import REMAT_POLICIES

PATHS = PLATFORMS["cpu"]
K, N = 24, 40

CASES = {
    "uneven": (64, (10, 30, 1, 23)),
    "experts without rows, first, between and last": (50, (0, 20, 0, 30, 0)),
    "all rows to one expert": (64, (0, 0, 64, 0)),
    "rows of no expert": (70, (5, 0, 40, 9)),
    "no rows at all": (16, (0, 0, 0)),
    "one expert": (33, (33,)),
    "one expert, and rows of none": (33, (20,)),
    "more rows than a block": (1300, (3, 700, 0, 257, 300)),
    "exactly whole blocks": (1024, (512, 128, 384)),
}


def _arrays(M: int, E: int, dtype=jnp.float32) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    x, w, dy = (rng.standard_normal(shape) for shape in ((M, K), (E, K, N), (M, N)))
    return jnp.asarray(x, dtype), jnp.asarray(w, jnp.float32), jnp.asarray(2.5 * dy, dtype)


def _exact(x: jax.Array) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32), np.float64)


def _expected(x: np.ndarray, w: np.ndarray, dy: np.ndarray, sizes: tuple[int, ...]) -> list[np.ndarray]:
    """Value, and gradients of x and w."""
    out, d_x, d_w = np.zeros(dy.shape), np.zeros(x.shape), np.zeros(w.shape)
    for e, (start, size) in enumerate(zip(np.cumsum(sizes) - sizes, sizes, strict=True)):
        rows = slice(start, start + size)
        out[rows], d_x[rows], d_w[e] = x[rows] @ w[e], dy[rows] @ w[e].T, x[rows].T @ dy[rows]
    return [out, d_x, d_w]


@functools.partial(jax.jit, static_argnums=0)
def _value_and_gradients(path: str, x: jax.Array, w: jax.Array, sizes: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
    out, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, path=path), x, w)
    return out, *pull(dy)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_a_loop_over_experts(path: str, case: str):
    """Gradients of 2.5 times the output, so that the incoming gradient must reach x and w alike."""
    M, sizes = CASES[case]
    x, w, dy = _arrays(M, len(sizes))
    found = _value_and_gradients(path, x, w, jnp.array(sizes, jnp.int32), dy)
    expected = _expected(_exact(x), _exact(w), _exact(dy), sizes)
    for part, ours, theirs in zip(("value", "x", "w"), found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * max(1.0, np.abs(theirs).max()), err_msg=part)
    total = sum(sizes)
    np.testing.assert_array_equal(found[0][total:], 0.0)
    np.testing.assert_array_equal(found[1][total:], 0.0)
    np.testing.assert_array_equal(found[2][np.array(sizes) == 0], 0.0)


@pytest.mark.parametrize("path", PATHS)
def test_rows_of_no_expert_leave_no_trace_even_of_nan(path: str):
    M, sizes = CASES["rows of no expert"]
    x, w, dy = _arrays(M, len(sizes))
    clean = _value_and_gradients(path, x, w, jnp.array(sizes, jnp.int32), dy)
    x, dy = x.at[sum(sizes) :].set(jnp.nan), dy.at[sum(sizes) :].set(jnp.nan)
    jax.tree.map(np.testing.assert_array_equal, _value_and_gradients(path, x, w, jnp.array(sizes, jnp.int32), dy), clean)


@pytest.mark.parametrize("path", PATHS)
def test_bfloat16_rounds_operands_and_results_only(path: str):
    """Sums are made in float32. A result is off by half a step of bfloat16, 2**-9, and the matrices' own rounding; their gradient by neither."""
    M, sizes = CASES["uneven"]
    x, w, dy = _arrays(M, len(sizes), jnp.bfloat16)
    found = _value_and_gradients(path, x, w, jnp.array(sizes, jnp.int32), dy)
    assert [part.dtype for part in found] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    rounded = w.astype(jnp.bfloat16)
    for ours, theirs in zip(found, _expected(_exact(x), _exact(rounded), _exact(dy), sizes), strict=True):
        rounding = 1e-5 if ours.dtype == jnp.float32 else 2.0**-8
        np.testing.assert_allclose(_exact(ours), theirs, rtol=rounding, atol=rounding * np.abs(theirs).max() / 8)


@pytest.mark.parametrize("path", PATHS)
def test_repeats_are_bit_equal(path: str):
    M, sizes = CASES["more rows than a block"]
    x, w, dy = _arrays(M, len(sizes))
    first, again = (_value_and_gradients(path, x, w, jnp.array(sizes, jnp.int32), dy) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)


@pytest.mark.parametrize("path", PATHS)
def test_layers_in_a_scan_whose_activations_are_made_again(path: str):
    M, sizes = CASES["uneven"]
    x, _, _ = _arrays(M, len(sizes))
    w = jnp.asarray(np.random.default_rng(1).standard_normal((3, len(sizes), K, K)) / K**0.5, jnp.float32)
    of_layers = jnp.array([sizes, sizes[::-1], (0, 64, 0, 0)], jnp.int32)

    def loss(product, x, w):
        layer = jax.checkpoint(lambda x, layer: (jnp.tanh(product(x, *layer)), None))
        return jnp.sum(jnp.square(jax.lax.scan(layer, x, (w, of_layers))[0]))

    def dense(x, w, sizes):
        expert = jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=M)
        return jnp.einsum("mk,mkn->mn", x, w[expert])

    found, expected = (
        jax.jit(jax.grad(functools.partial(loss, product), (0, 1)))(x, w)
        for product in (functools.partial(grouped_matmul, path=path), dense)
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), found, expected)


@pytest.mark.parametrize("path", PATHS)
def test_each_device_multiplies_its_own_rows(path: str):
    """Inside `shard_map`: half of the rows on each device, with sizes of their own, and matrices on both."""
    M, sizes = 32, np.array([[10, 0, 22], [5, 20, 3]], np.int32)
    x, w, dy = _arrays(2 * M, 3)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    rows, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()

    def local(x, w, sizes):
        return grouped_matmul(x, w, sizes[0], path=path)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(rows, whole, rows), out_specs=rows, check_vma=False)

    @jax.jit
    def value_and_gradients(x, w, sizes, dy):
        out, pull = jax.vjp(lambda x, w: mapped(x, w, sizes), x, w)
        return out, *pull(dy)

    found = value_and_gradients(x, w, jnp.asarray(sizes), dy)
    halves = [_expected(_exact(x[half]), _exact(w), _exact(dy[half]), tuple(sizes[i])) for i, half in enumerate((slice(M), slice(M, None)))]
    expected = [np.concatenate([halves[0][i], halves[1][i]]) for i in range(2)] + [halves[0][2] + halves[1][2]]
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("path", PATHS)
def test_a_policy_that_saves_products_saves_these(path: str):
    """What the next layer needs of the first product is kept, and no forward product is made again."""
    M, sizes = CASES["uneven"]
    x, w, _ = _arrays(M, len(sizes))

    def made(policy) -> str:
        def loss(x, w):
            return jnp.sum(jnp.sin(grouped_matmul(x, w, jnp.array(sizes, jnp.int32), path=path)))

        return str(jax.make_jaxpr(jax.grad(jax.checkpoint(loss, policy=policy), (0, 1)))(x, w))

    again, kept = (made(policy).count("dot_general") for policy in (jax.checkpoint_policies.nothing_saveable, REMAT_POLICIES["dots"]))
    assert kept < again
    assert kept == made(jax.checkpoint_policies.everything_saveable).count("dot_general")
