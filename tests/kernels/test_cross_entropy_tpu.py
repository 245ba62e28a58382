"""Tokamax's kernel of cross-entropy, run by the interpreter of TPU kernels, beside the plain reference."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import tpu_info
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from tokamax._src.ops.linear_softmax_cross_entropy_loss import pallas_mosaic_tpu_kernel as kernel

from telamon.config.schema import AXES
from telamon.errors import ConfigError
from telamon.kernels import cross_entropy_tpu
from telamon.kernels.cross_entropy import reference_cross_entropy
from telamon.kernels.cross_entropy_pick import Request, choose, cross_entropy
from telamon.parallel import local
from telamon.parallel.target import Target

B, T, D, V = 4, 50, 136, 300  # no multiples of a block's size, 128


@pytest.fixture
def v5e(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chip that is not there."""
    monkeypatch.setattr(tpu_info, "get_device_kind", lambda: "TPU v5 lite")
    monkeypatch.setattr(tpu_info, "get_num_device_cores", lambda: 1)


@pytest.fixture
def interpreted(v5e: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks so small that there are several each way.

    What lies behind an array's end reads as NaN, and copies end as late as they may, so that neither goes unseen.
    """
    monkeypatch.setattr(pltpu, "TensorCoreMesh", functools.partial(pltpu.TensorCoreMesh, num_cores=1))
    for name in ("get_heuristic_fwd_config", "get_heuristic_bwd_config"):
        monkeypatch.setattr(kernel, name, lambda *sizes, **room: kernel.Config(128, 128, 128))
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(buffer_bounds="padded", dma_execution_mode="on_wait")):
        yield


def _arrays(columns: int = V) -> tuple[jax.Array, ...]:
    """Hidden states, head, targets, and a mask that leaves out a row and parts of others."""
    rng = np.random.default_rng(0)
    hidden, head = (jnp.asarray(0.3 * rng.standard_normal(shape), jnp.float32) for shape in ((B, T, D), (D, columns)))
    mask = np.arange(T)[None] < np.array([[T], [0], [7], [31]])
    return hidden, head, jnp.asarray(rng.integers(0, columns, (B, T)), jnp.int32), jnp.asarray(mask, jnp.float32)


def _results(loss: Any, *arrays: jax.Array) -> tuple[Any, ...]:
    """The sums, and the gradients of 2.5 times the objective."""

    @jax.jit
    def run(hidden, head, targets, mask):
        def scaled(hidden, head):
            sums = loss(hidden, head, targets, mask)
            return 2.5 * sums.objective, sums

        return jax.value_and_grad(scaled, argnums=(0, 1), has_aux=True)(hidden, head)

    (_, sums), gradients = run(*arrays)
    return sums, *gradients


def _compare(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> None:
    np.testing.assert_allclose(ours[0].objective, theirs[0].nll, rtol=1e-5)
    np.testing.assert_allclose(ours[0].nll, theirs[0].nll, rtol=1e-5)
    assert ours[0].correct is None, "left out, not wrong"
    for x, y in zip(ours[1:], theirs[1:], strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)


@pytest.mark.parametrize("columns", [300, 384])
def test_sums_and_gradients_equal_those_of_whole_logits(columns: int, interpreted: None, monkeypatch: pytest.MonkeyPatch):
    """Of a head in one block, and of one in three."""
    monkeypatch.setattr(local, "BLOCK_BYTES", 4 * D * 128 if columns == 384 else 2**29)
    assert cross_entropy_tpu._columns(D, columns) == (128 if columns == 384 else 300)
    arrays = _arrays(columns)
    _compare(_results(cross_entropy_tpu.run, *arrays), _results(reference_cross_entropy, *arrays))


def test_devices_join_their_columns_and_tokens(interpreted: None):
    """Rows over data and fsdp, columns over tensor; the head's gradient comes back in shares over fsdp and tensor."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 1, 1, 1, 2), AXES, axis_types=(AxisType.Auto,) * 6)
    arrays = _arrays()
    with jax.set_mesh(mesh):
        ours = _results(cross_entropy_tpu.run, *arrays)
    assert ours[2].sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec("fsdp", "tensor")), 2)
    _compare(ours, _results(reference_cross_entropy, *arrays))


def _request(**changes: Any) -> Request:
    target = Target("tpu", "TPU v5 lite", (("data", 2), ("fsdp", 2), ("context", 1), ("tensor", 2)))
    return Request(**{"target": target, "B": 8, "T": T, "D": D, "V": V, "vocab": V, "dtype": "bfloat16"} | changes)


def test_a_tpu_takes_it_and_it_says_what_it_cannot(monkeypatch: pytest.MonkeyPatch):
    assert (choose(_request()).path, choose(_request()).refused) == ("tokamax", ())
    assert choose(_request(), "chunked").path == "chunked"
    for changes, reason in [
        ({"z_loss": 1e-4}, r"no z-loss \(train.z_loss=0.0001\)"),
        ({"softcap": 30.0}, "no cap on logits"),
        ({"vocab": V - 1}, "1 columns of the head stand for no token"),
        ({"dtype": "float16"}, "not in float16"),
        ({"D": 100}, "100 is not divisible by 8"),
        ({"B": 6}, "6 rows do not split evenly over 4 devices"),
        ({"V": 301, "vocab": 301}, "301 columns do not split evenly over 2 devices"),
    ]:
        assert choose(_request(**changes)).path == "chunked"
        with pytest.raises(ConfigError, match=rf"train\.loss=tokamax cannot serve.*{reason}"):
            choose(_request(**changes), "tokamax")
    with pytest.raises(ConfigError, match=r"train\.loss=tokamax is not for gpu"):
        choose(_request(target=Target("gpu", "NVIDIA H100", ())), "tokamax")
    monkeypatch.setattr(cross_entropy_tpu, "installed", lambda: False)
    assert "not installed" in (cross_entropy_tpu.refusal(_request()) or "")


@pytest.mark.parametrize(("V", "columns"), [(128_256, 768), (151_936, 1024), (300, 384)])
def test_blocks_are_not_small_where_the_vocabulary_has_small_divisors_only(v5e: None, V: int, columns: int):
    """Divisors of 151,936 that are multiples of 128: itself and 128."""
    x, w = jax.ShapeDtypeStruct((4096, 2048), jnp.bfloat16), jax.ShapeDtypeStruct((2048, V), jnp.bfloat16)
    assert cross_entropy_tpu._blocks(kernel.get_heuristic_bwd_config, x, w)["v_block_size"] == columns


def test_elsewhere_it_is_the_chunked_one():
    arrays = _arrays()
    ours, theirs = (_results(f, *arrays) for f in (functools.partial(cross_entropy, chunk=64), reference_cross_entropy))
    assert ours[0].correct is not None and ours[0].correct == theirs[0].correct
    np.testing.assert_allclose(ours[2], theirs[2], atol=2e-5)
