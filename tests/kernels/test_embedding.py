import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from telamon.config.schema import MeshConfig
from telamon.kernels.cross_entropy import cross_entropy
from telamon.kernels.embedding import look_up
from telamon.parallel import local
from telamon.parallel.mesh import build_mesh

pytestmark = pytest.mark.xdist_group("mesh")

V, D, B, T = 48, 16, 8, 12


def _inputs() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    return {
        "table": jnp.asarray(rng.standard_normal((V, D)), jnp.float32),
        "ids": jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32),
        "mask": jnp.asarray(rng.random((B, T)) < 0.7, jnp.float32),
    }


def _value_and_gradient(table: jax.Array, ids: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A tied table, read at both ends."""

    def objective(table: jax.Array) -> jax.Array:
        return 2.5 * cross_entropy(look_up(table, ids, "float32"), table.T, jnp.roll(ids, 1), mask, chunk=4, z_loss=1e-2).objective

    return jax.value_and_grad(objective)(table)


def test_common_tokens_add_up_in_float32_under_bfloat16_activations():
    """4,096 times 1.0: bfloat16 sums stop growing at 256."""
    ids = jnp.zeros((4, 1024), jnp.int32)

    def total(table: jax.Array) -> jax.Array:
        return look_up(table, ids, "bfloat16").astype(jnp.float32).sum()

    gradient = jax.jit(jax.grad(total))(jnp.ones((2, 8), jnp.float32))
    np.testing.assert_array_equal(gradient, [[4096.0] * 8, [0.0] * 8])


@pytest.fixture(scope="module")
def one_device() -> tuple[np.ndarray, np.ndarray]:
    value, gradient = jax.jit(_value_and_gradient)(**_inputs())
    return np.asarray(value), np.asarray(gradient)


@pytest.mark.parametrize("block", [2**29, 4 * 16 * 12])  # of the table's gradient: all of it, a quarter
@pytest.mark.parametrize("layout", [MeshConfig(fsdp=8), MeshConfig(data=2, fsdp=2, tensor=2)], ids=["fsdp", "data, fsdp, tensor"])
def test_devices_add_up_their_own_rows_and_reduce_once(
    layout: MeshConfig, block: int, one_device: tuple[np.ndarray, np.ndarray], monkeypatch: pytest.MonkeyPatch
):
    """Equal to one device; and in the compiled program the head's gradient is reduced outside of the loop over chunks."""
    monkeypatch.setattr(local, "BLOCK_BYTES", block)
    mesh, inputs = build_mesh(layout), _inputs()
    where = {"table": PartitionSpec("tensor", "fsdp"), "ids": PartitionSpec(("data", "fsdp")), "mask": PartitionSpec(("data", "fsdp"))}
    placed = {name: jax.device_put(x, NamedSharding(mesh, where[name])) for name, x in inputs.items()}
    with jax.set_mesh(mesh):
        outs = (None, NamedSharding(mesh, where["table"]))
        fresh = functools.partial(_value_and_gradient)  # JAX would know the function itself, and keep its first program
        compiled = jax.jit(fresh, out_shardings=outs).lower(**placed).compile()
    value, gradient = compiled(**placed)
    np.testing.assert_allclose(value, one_device[0], rtol=1e-6)
    np.testing.assert_allclose(gradient, one_device[1], rtol=1e-5, atol=1e-5)
    text = compiled.as_text()
    assert text
    reduced = [line for line in text.splitlines() if " all-reduce(" in line or " reduce-scatter(" in line]
    assert any(" reduce-scatter(" in line for line in reduced)
    if layout.tensor == 1:  # columns over tensor are added up chunk by chunk, their normalisers being sums
        in_loops = [line for line in reduced if "while/body" in line]
        assert len(in_loops) == (0 if block == 2**29 else 2), "over blocks of the table and of the head, not over chunks of the loss"
