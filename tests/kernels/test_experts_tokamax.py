"""The path of Tokamax's grouped matmul without a TPU or GPU: what our arguments mean to it, where it is taken, and which kernels a program gets.

JAX's interpreter does not run the second generation's kernels (it knows no transfers of reshaped memory). A twin in plain XLA takes
the same arguments and leaves rows that kernels do not write as they are in fresh memory, that is, as anything.
"""

import re
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from tokamax._src.ops.gmm_v2 import gmm_v2, tgmm_v2
from tokamax._src.ops.ragged_dot import api
from tokamax._src.ops.ragged_dot.base import RaggedDot

from telamon.config.schema import MeshConfig
from telamon.errors import ConfigError
from telamon.kernels.experts import Request, choose, grouped_matmul, grouped_tokamax, ragged_dot
from telamon.kernels.experts.rule import on_one_device
from telamon.kernels.picks import noted
from telamon.parallel.mesh import build_mesh
from telamon.parallel.target import Target

V6E, H100, B200, A100 = "TPU v6 lite", "NVIDIA H100 80GB HBM3", "NVIDIA B200", "NVIDIA A100-SXM4-80GB"
M, K, N, SIZES = 200, 128, 256, (60, 0, 30, 101)


def _mesh(kind: str, **sizes: int) -> AbstractMesh:
    device = AbstractDevice(device_kind=kind, num_cores=1, platform="tpu" if "TPU" in kind else "gpu")
    sizes = sizes or {"data": 1}
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes), abstract_device=device)


def _unwritten(out: jax.Array, sizes: jax.Array) -> jax.Array:
    return jnp.where(jnp.arange(out.shape[0])[:, None] < jnp.sum(sizes), out, jnp.nan)


def _product_twin(x: jax.Array, w: jax.Array, sizes: jax.Array, *, transpose_rhs: bool, zero_initialize: bool, **options: Any) -> jax.Array:
    del zero_initialize, options
    return _unwritten(ragged_dot.product(x, w, sizes, transposed=transpose_rhs), sizes)


def _gradient_twin(
    x: jax.Array, dy: jax.Array, sizes: jax.Array, experts: int, *, preferred_element_type: Any, **options: Any
) -> jax.Array:
    del options
    assert x.shape[0] == dy.shape[0] and x.shape[0] % 16 == 0, "rows come in whole groups of 16"
    assert experts == sizes.shape[0] and preferred_element_type == jnp.float32
    return ragged_dot.weight_gradient(x, dy, sizes)


class _Twin:
    """Tokamax's operation in plain XLA."""

    def __call__(self, x: jax.Array, y: jax.Array, *, group_sizes: jax.Array, **options: Any) -> jax.Array:
        out = RaggedDot()(x, y, group_sizes=group_sizes, **options)
        return _unwritten(out, group_sizes) if out.ndim == 2 else out


@pytest.mark.parametrize("kind", [V6E, H100, B200])
def test_what_is_handed_to_the_library_is_the_grouped_product_and_its_gradients(kind: str, monkeypatch: pytest.MonkeyPatch):
    """Of 2.5 times the output; rows of no expert, which no kernel writes, give zeros."""
    monkeypatch.setattr(gmm_v2, "gmm_v2", _product_twin)
    monkeypatch.setattr(tgmm_v2, "tgmm_v2", _gradient_twin)
    monkeypatch.setattr(api, "IMPLEMENTATIONS", {"mosaic_gpu": _Twin()})
    monkeypatch.setattr(grouped_tokamax, "target", lambda: Target("tpu" if "TPU" in kind else "gpu", kind, ()))
    rng = np.random.default_rng(0)
    shapes = ((M, K), jnp.bfloat16), ((len(SIZES), K, N), jnp.float32), ((M, N), jnp.bfloat16)
    x, w, dy = (jnp.asarray(2.5 * rng.standard_normal(shape), dtype) for shape, dtype in shapes)
    sizes = jnp.array(SIZES, jnp.int32)
    for rows, transposed in ((x, False), (dy, True)):
        found, expected = (path.product(rows, w, sizes, transposed=transposed) for path in (grouped_tokamax, ragged_dot))
        np.testing.assert_array_equal(found, expected)
    found, expected = (path.weight_gradient(x, dy, sizes) for path in (grouped_tokamax, ragged_dot))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-3)


def _request(kind: str, **changes: Any) -> Request:
    plain = dict(M=4096, K=2048, N=768, E=128, dtype="bfloat16", alone=True)
    return Request(Target("tpu" if "TPU" in kind else "gpu", kind, ()), **{**plain, **changes})


@pytest.mark.parametrize(
    ("request_", "path", "reason"),
    [
        (_request(V6E), "tokamax", None),
        (_request(H100), "tokamax", None),
        (_request(B200), "tokamax", None),
        (_request(A100), "blocked", "for Hopper and Blackwell, which NVIDIA A100"),
        (_request("AMD Instinct MI300X"), "blocked", "AMD Instinct MI300X is not known"),
        (_request(V6E, dtype="float32"), "blocked", "bfloat16, not in float32"),
        (_request(V6E, K=2880, N=2880), "tokamax", None),
        (_request(V6E, K=1000), "blocked", "matrices of 1000 x 768 are not in multiples of 64"),
        (_request(H100, N=100), "blocked", "matrices of 2048 x 100 are not in multiples of 64"),
        (_request(V6E, alone=False), "blocked", "the mesh's devices share them"),
    ],
    ids=lambda value: f"{value.target.device_kind} {value.K} {value.dtype}" if isinstance(value, Request) else "",
)
def test_auto_takes_the_kernels_where_they_serve(request_: Request, path: str, reason: str | None):
    pick = choose(request_)
    assert pick.path == path
    assert len(pick.refused) == (reason is not None)
    if reason is not None:
        assert pick.refused[0][0] == "tokamax" and reason in pick.refused[0][1]
        with pytest.raises(ConfigError, match=r"train\.experts\.path=tokamax cannot serve this model"):
            choose(request_, "tokamax")


def test_a_cpu_has_no_kernels():
    on_cpu = Request(Target("cpu", "", ()), M, K, N, 4, "float32")
    assert str(choose(on_cpu)) == "experts: blocked"
    with pytest.raises(ConfigError, match=r"train\.experts\.path=tokamax is not for cpu; there it is one of: auto, blocked, ragged_dot"):
        choose(on_cpu, "tokamax")


def test_arrays_are_a_devices_own_without_a_mesh_of_several_or_inside_a_shard_map_over_all_of_it():
    seen = []

    def look(x: jax.Array) -> jax.Array:
        seen.append(on_one_device())
        return x

    look(jnp.ones(4))
    rows = jax.sharding.PartitionSpec("data")
    with jax.sharding.use_abstract_mesh(_mesh(V6E, data=2, tensor=2, context=1)):
        jax.eval_shape(look, jnp.ones(4))
        jax.eval_shape(jax.shard_map(look, in_specs=rows, out_specs=rows, axis_names={"data"}, check_vma=False), jnp.ones(4))
        jax.eval_shape(jax.shard_map(look, in_specs=rows, out_specs=rows, axis_names={"data", "tensor"}, check_vma=False), jnp.ones(4))
    assert seen == [True, False, False, True]


@pytest.mark.parametrize(("kind", "kernels"), [(H100, 4), (B200, 3)])
def test_a_lowered_program_calls_the_kernels_of_its_gpu(kind: str, kernels: int):
    """Forward, again for the gradient, and both gradients (on Blackwell the weights' by blocks), on each of two devices."""
    rows, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()

    @jax.checkpoint
    def local(x, w, sizes):
        return jnp.sin(grouped_matmul(x, w, sizes[0]))

    mapped = jax.shard_map(local, in_specs=(rows, whole, rows), out_specs=rows, axis_names={"data"}, check_vma=False)
    shapes = ((2 * M, K), jnp.bfloat16), ((4, K, N), jnp.float32), ((2, 4), jnp.int32)
    step = jax.value_and_grad(lambda x, w, sizes: jnp.sum(mapped(x, w, sizes).astype(jnp.float32)), (0, 1))
    with jax.sharding.use_abstract_mesh(_mesh(kind, data=2)), noted() as picks:
        traced = jax.jit(step).trace(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert [str(pick) for pick in picks] == ["experts: tokamax"]
    assert len(re.findall(r"custom_call @mosaic_gpu_v2", text)) == kernels


def test_the_compiler_of_gpus_takes_the_kernels_without_one():
    """Forward, and both gradients; 1,000 rows are filled up for the weights' gradient."""
    if not (find_spec("jax_plugins") and find_spec("jax_plugins.xla_cuda13")):
        pytest.skip("the compiler for GPUs is not installed (extra plan-gpu)")
    from telamon.plan.topology import aot_devices, parse_topology

    mesh = build_mesh(MeshConfig(), devices=aot_devices(parse_topology("h100:1")))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shapes = ((1000, K), jnp.bfloat16), ((4, K, N), jnp.float32), ((4,), jnp.int32)
    step = jax.grad(lambda x, w, sizes: jnp.sum(jnp.sin(grouped_matmul(x, w, sizes).astype(jnp.float32))), (0, 1))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(step).lower(*(jax.ShapeDtypeStruct(*shape, sharding=whole) for shape in shapes)).compile()
    assert len(re.findall(r'custom_call_target="mosaic_gpu_v2"', compiled.as_text() or "")) == 3
