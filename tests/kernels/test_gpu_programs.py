"""Attention of GPUs, without one: what our arguments mean to a path, which path is taken, and which kernels a program gets.

The kernels do not run here. Each has a twin in plain XLA that takes the same arguments, and that is compared with the reference.
"""

import functools
import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from tokamax._src.ops.attention.base import DotProductAttention

from telamon.config.schema import AXES, MeshConfig
from telamon.kernels import gpus
from telamon.kernels.attention import Places, Scores, attention, cudnn, flash_tokamax, reference_attention, rows, visible
from telamon.kernels.attention.pick import Request, choose
from telamon.parallel.mesh import build_mesh
from telamon.parallel.target import Target

H100, A100, B200 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA B200"
N, K, H = 4, 2, 16


def _twin_gradients(
    statistics: Any, out: jax.Array, d_out: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, *, mask: Any, **options: Any
) -> Any:
    """Gradients of Tokamax's attention in plain XLA, from what its backward kernels are given: output, largest scores, sums of exponentials."""
    assert not options["return_residuals"]
    scale, cap, groups = options["logits_scale"], options["logits_soft_cap"], q.shape[2] // k.shape[2]
    k_all, v_all = jnp.repeat(k, groups, 2), jnp.repeat(v, groups, 2)
    top, total = (x[..., None] for x in statistics)

    def scored(q: jax.Array, k: jax.Array) -> jax.Array:
        scores = scale * jnp.einsum("btnh,bsnh->bnts", q, k)
        return scores if cap is None else cap * jnp.tanh(scores / cap)

    scores, pull = jax.vjp(scored, q, k_all)
    weights = jnp.where(mask.as_array(q.shape[1], k.shape[1]), jnp.exp(scores - top) / total, 0.0)
    delta = jnp.einsum("btnh,btnh->bnt", out, d_out)[..., None]
    d_q, d_k = pull(weights * (jnp.einsum("btnh,bsnh->bnts", d_out, v_all) - delta))
    d_v = jnp.einsum("bnts,btnh->bsnh", weights, d_out)
    return {"q": d_q, **{name: x.reshape(*y.shape[:3], groups, -1).sum(3) for name, x, y in (("k", d_k, k), ("v", d_v, v))}}


TWINS: dict[str, Callable[..., jax.Array]] = {
    "cudnn": functools.partial(cudnn.run, implementation="xla"),
    "tokamax": functools.partial(flash_tokamax.run, operation=DotProductAttention(vjp=_twin_gradients)),
}


def _places(T: int) -> Places:
    """Four rows: one document; three packed, the second of which is a later part; padded left; packed and padded right."""
    cut, pad = T // 3, T // 4
    documents = [
        [(1, T, 0)],
        [(1, cut, 0), (2, T - 2 * cut, 7), (3, cut, 0)],
        [(0, pad, 0), (1, T - pad, 0)],
        [(1, cut, 0), (0, T - cut, 0)],
    ]
    positions = [np.concatenate([np.arange(first, first + size) for _, size, first in row]) for row in documents]
    segments = [np.repeat([segment for segment, _, _ in row], [size for _, size, _ in row]) for row in documents]
    return Places(jnp.asarray(np.stack(positions), jnp.int32), jnp.asarray(np.stack(segments), jnp.int32))


def _arrays(T: int, value_dim: int = H) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    sizes = ((N, H), (K, H), (K, value_dim))
    return [jnp.asarray(rng.standard_normal((4, T, *size)), jnp.float32) for size in sizes]


@functools.partial(jax.jit, static_argnums=0)
def _value_and_gradients(function: Callable[..., jax.Array], *arrays: jax.Array) -> tuple[jax.Array, ...]:
    out, pull = jax.vjp(function, *arrays)
    return out, *pull(jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))


@pytest.mark.parametrize("scores", [Scores(0.3), Scores(0.3, window=13), Scores(0.5, window=30, chunk=11)], ids=str)
def test_the_first_key_and_those_up_to_the_query_are_what_it_sees(scores: Scores):
    places = _places(50)
    first, index = np.asarray(rows.first_keys(places, scores)), np.arange(50)
    ranges = (index >= first[:, :, None]) & (index <= index[:, None])
    real = np.asarray(places.segments > 0)
    np.testing.assert_array_equal(ranges[real], np.asarray(visible(places, places, scores.window, scores.chunk))[real])
    np.testing.assert_array_equal(ranges[~real].sum(axis=-1), 1)


@pytest.mark.parametrize(
    ("scores", "value_dim"),
    [(Scores(0.3, window=13), H), (Scores(0.5, window=30, chunk=11), H // 2), (Scores(0.4, softcap=2.0), H), (Scores(0.3), H + 8)],
    ids=str,
)
def test_every_twin_equals_the_reference_in_value_and_gradient(scores: Scores, value_dim: int):
    """Documents, padding, groups of heads, scale, windows of exactly W keys, chunks and caps as a path hands them to its library;
    values as wide as keys, narrower and wider."""
    places, arrays = _places(50), _arrays(50, value_dim)
    mask = visible(places, places, scores.window, scores.chunk)
    expected = _value_and_gradients(functools.partial(reference_attention, mask=mask, scores=scores), *arrays)
    for name, run in TWINS.items():
        if name == "cudnn" and scores.softcap is not None:
            continue
        path = functools.partial(run, queries=places, keys=places, scores=scores, aligned=True)
        for part, ours, theirs in zip("oqkv", _value_and_gradients(path, *arrays), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-5, err_msg=f"{name} {part}")


SINKS = jnp.array([-1.0, 0.5, 40.0, 1.0])
"""For each query head; the third leaves next to nothing to the other scores, and is larger than all of them."""


@pytest.mark.parametrize("scores", [Scores(0.3, window=13), Scores(0.4, softcap=2.0, chunk=11)], ids=str)
def test_sinks_are_added_to_what_a_kernel_gives(scores: Scores):
    """Forward to its output, and to the statistics that the backward pass starts from; the gradient of the sinks too."""
    places, arrays = _places(50), [*_arrays(50), SINKS]
    mask = visible(places, places, scores.window, scores.chunk)

    def reference(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> jax.Array:
        return reference_attention(q, k, v, mask, scores=scores, sinks=sinks)

    def ours(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> jax.Array:
        return TWINS["tokamax"](q, k, v, queries=places, keys=places, scores=scores, aligned=True, sinks=sinks)

    expected = _value_and_gradients(reference, *arrays)
    for part, x, y in zip("oqkvs", _value_and_gradients(ours, *arrays), expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4 if part == "s" else 2e-5, err_msg=part)
    assert np.abs(expected[-1]).max() > 0.1


@pytest.mark.parametrize("name", ["cudnn", "tokamax"])
def test_each_device_has_its_own_rows_and_heads(name: str):
    places, arrays, scores = _places(50), _arrays(50), Scores(0.3, window=13)
    path = functools.partial(TWINS[name], queries=places, keys=places, scores=scores, aligned=True)
    whole = _value_and_gradients(path, *arrays)
    with jax.set_mesh(build_mesh(MeshConfig(fsdp=4, tensor=2), devices=jax.devices())):
        split = _value_and_gradients(lambda *arrays: path(*arrays), *arrays)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-6), split, whole)


def _request(kind: str = H100, **changes: Any) -> Request:
    plain = dict(B=8, T=4096, S=4096, N=32, K=8, H=128, dtype="bfloat16", scores=Scores(1.0), sinks=False, aligned=True)
    return Request(Target("gpu", kind, (("fsdp", 4), ("tensor", 2))), **{**plain, **changes})


@pytest.mark.parametrize(
    ("request_", "path", "refused"),
    [
        (_request(), "cudnn", {}),
        (_request(scores=Scores(1.0, window=512, chunk=2048)), "cudnn", {}),
        (_request(scores=Scores(1.0, softcap=50.0)), "tokamax", {"cudnn": "no cap on scores"}),
        (_request(A100, scores=Scores(1.0, softcap=50.0)), "chunked", {"cudnn": "no cap", "tokamax": "A100.* backward pass has no cap"}),
        (_request(sinks=True, H=64, scores=Scores(0.125, window=128)), "tokamax", {"cudnn": "no sinks"}),
        (_request(dtype="float32"), "chunked", {"cudnn": "not in float32", "tokamax": "not in float32"}),
        (_request(T=16384), "tokamax", {"cudnn": r"mask would take 1\.0 GiB a device, more than 0\.5"}),
        (_request(A100, T=32768), "chunked", {"cudnn": r"4\.0 GiB", "tokamax": r"on NVIDIA A100.* 2\.0 GiB"}),
        (_request(A100, H=256), "tokamax", {"cudnn": "head_dim=256 is not a multiple of 8 up to 128"}),
        (_request(H=512), "chunked", {"cudnn": "head_dim=512", "tokamax": "head_dim=512"}),
        (_request(T=4095), "tokamax", {"cudnn": "rows of 4095 tokens are odd"}),
        (_request(aligned=False), "chunked", {"cudnn": "keys of a cache", "tokamax": "keys of a cache"}),
        (_request(K=1), "chunked", {"cudnn": "1 kv heads do not split", "tokamax": "1 kv heads do not split"}),
        (_request("AMD Instinct MI300X"), "chunked", {"cudnn": "MI300X is not known", "tokamax": "MI300X is not known"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_path_serves_or_says_why_not(request_: Request, path: str, refused: dict[str, str]):
    picked = choose(request_)
    assert picked.path == path
    assert [name for name, _ in picked.refused] == list(refused)
    for name, reason in picked.refused:
        assert re.search(refused[name], reason), reason


def test_without_tokamax_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(flash_tokamax, "_installed", lambda: False)
    picked = choose(_request(scores=Scores(1.0, softcap=50.0)))
    assert (picked.path, dict(picked.refused)["tokamax"]) == ("chunked", "Tokamax is not installed (extra `cuda13`)")


def test_a_gpu_that_is_not_here_is_known_by_its_description():
    known = {kind: gpus.gpu_of(Target("gpu", kind, ())) for kind in (H100, A100, B200)}
    assert {kind: (gpu.compute_capability, gpu.core_count, gpu.here) for kind, gpu in known.items() if gpu} == {
        H100: ("9.0", 132, False),
        A100: ("8.0", 108, False),
        B200: ("10.0", 148, False),
    }


def test_answers_are_taken_back_also_after_an_error():
    def fails() -> None:
        with gpus.answering((functools, "reduce", lambda: "ours")):
            assert functools.reduce() == "ours"  # type: ignore[call-arg]
            raise RuntimeError

    before = functools.reduce
    with pytest.raises(RuntimeError):
        fails()
    assert functools.reduce is before


def _step(path: str, scores: Scores, *, sinks: bool = False) -> Callable[..., Any]:
    options: Any = {"scores": scores, "aligned": True, "path": path}

    def step(q: jax.Array, k: jax.Array, v: jax.Array, places: Places) -> Any:
        @jax.checkpoint
        def loss(*arrays: jax.Array) -> jax.Array:
            learned = jnp.zeros(N) if sinks else None
            return jnp.sum(attention(*arrays, queries=places, keys=places, sinks=learned, **options).astype(jnp.float32))

        return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)

    return step


def _shapes(T: int, widths: tuple[int, int] = (64, 64), **options: Any) -> tuple[Any, ...]:
    """Of queries, keys and values of these widths, and their places."""
    ids: Any = jax.ShapeDtypeStruct((2, T), jnp.int32, **options)
    sizes = ((N, widths[0]), (K, widths[0]), (K, widths[1]))
    q, k, v = (jax.ShapeDtypeStruct((2, T, *size), jnp.bfloat16, **options) for size in sizes)
    return q, k, v, Places(ids, ids)


CUDNN = {"__cudnn$fmhaScaleBiasSoftmax": 2, "__cudnn$fmhaScaleBiasSoftmaxBackward": 1}
LATENT = (192, 128)
"""Widths of DeepSeek's queries and keys, and of its values."""


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "path", "scores", "widths", "sinks", "kernels"),
    [
        (H100, "cudnn", Scores(0.1, window=100), (64, 64), False, CUDNN),
        (H100, "cudnn", Scores(0.1), LATENT, False, CUDNN),
        (H100, "tokamax", Scores(0.1, window=100, softcap=9.0), (64, 64), False, {"mosaic_gpu_v2": 4}),
        (H100, "tokamax", Scores(0.1), LATENT, False, {"mosaic_gpu_v2": 4}),
        (H100, "auto", Scores(0.125, window=100), (64, 64), True, {"mosaic_gpu_v2": 4}),
        (B200, "tokamax", Scores(0.1, chunk=100), LATENT, False, {"mosaic_gpu_v2": 4}),
        (A100, "tokamax", Scores(0.1), (64, 64), False, {"__gpu$xla.gpu.triton": 3}),
        (A100, "tokamax", Scores(0.1), LATENT, False, {"__gpu$xla.gpu.triton": 3}),
    ],
)
def test_a_lowered_program_calls_the_kernels_of_its_gpu(
    kind: str, path: str, scores: Scores, widths: tuple[int, int], sinks: bool, kernels: dict[str, int]
):
    """Forward, again for the gradient, and backward (Mosaic's of queries and of keys apart), split over four devices.

    There is no GPU and no CUDA here, and the layer is traced once more after the call, as in a model that keeps no activations.
    """
    device = AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    sizes = tuple({"fsdp": 2, "tensor": 2}.get(axis, 1) for axis in AXES)
    mesh = AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(_step(path, scores, sinks=sinks)).trace(*_shapes(256, widths)).lower(lowering_platforms=("cuda",)).as_text()
    found = re.findall(r"custom_call @([^ (]+)", text)
    assert {name: found.count(name) for name in kernels} == kernels


@pytest.mark.parametrize("path", ["cudnn", "tokamax"])
def test_the_compiler_of_gpus_takes_the_kernels_without_one(path: str):
    """At the sizes of latent attention."""
    if not (find_spec("jax_plugins") and find_spec("jax_plugins.xla_cuda13")):
        pytest.skip("the compiler for GPUs is not installed (extra plan-gpu)")
    from telamon.plan.topology import aot_devices, parse_topology

    mesh = build_mesh(MeshConfig(), devices=aot_devices(parse_topology("h100:1")))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        compiled = jax.jit(_step(path, Scores(0.1, window=100))).lower(*_shapes(128, LATENT, sharding=whole)).compile()
    kernel = {"cudnn": "__cudnn$fmhaScaleBiasSoftmaxBackward", "tokamax": "mosaic_gpu_v2"}[path]
    assert f'custom_call_target="{kernel}"' in (compiled.as_text() or "")
