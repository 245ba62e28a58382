"""Attention on NVIDIA GPUs by Tokamax's FlashAttention: Mosaic kernels on Hopper and Blackwell, Triton kernels elsewhere.

What a query of an aligned row sees is a range of keys, and these kernels take the first key of each query. Documents, windows and
chunks so need no mask, and blocks of keys outside of every query's range are left out. The exception is Triton's backward pass,
which writes the ranges out as a mask, a byte a pair. (JAX says that Triton's kernels in it are to go; Mosaic's are not.)

The kernels have no sinks. A sink takes its share of the softmax and gives nothing, so it scales what the other scores give; that is done
after the forward kernel, to its output and to the statistics of its softmax, from which the backward kernels then make weights that sum
to less than 1.

XLA's compiler for GPUs takes both kinds without a GPU. Sizes of blocks come from Tokamax's table of tuned ones for the GPU, or its
rules where the table has no such shape.
"""

import functools
import importlib.util
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from telamon.kernels import gpus
from telamon.kernels.attention import rows
from telamon.kernels.attention.rule import SAVED, Places, Request, Scores
from telamon.parallel.target import target

_MASK_BYTES = 1 << 29
"""Bytes of a device's mask above which Triton's kernels are refused."""

_LARGEST = 256
"""Features of a head for which the kernels were compiled."""


def refusal(request: Request) -> str | None:
    """Why a request cannot be served; None: it can."""
    gpu = gpus.gpu_of(request.target)
    if not _installed():
        return "Tokamax is not installed (extra `cuda13`)"
    if gpu is None:
        return f"it is for NVIDIA's GPUs, and {request.target.device_kind or 'this device'} is not known as one"
    if gpu.capability < (8, 0):
        return f"{gpu.device_kind} is older than Ampere"
    if request.dtype not in ("bfloat16", "float16"):
        return f"it computes in bfloat16 and float16, not in {request.dtype}"
    if request.H > _LARGEST:
        return f"head_dim={request.H} is more than {_LARGEST}"
    if _kernel(gpu, request.H) == "triton":
        if request.scores.softcap is not None:
            return f"on {gpu.device_kind} its backward pass has no cap on scores"
        if (mask := rows.rows_of_device(request) * request.T**2) > _MASK_BYTES:
            return f"on {gpu.device_kind} its mask would take {mask / 2**30:.1f} GiB a device, more than {_MASK_BYTES / 2**30:.1f} GiB"
    return rows.refusal(request)


def run(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    queries: Places,
    keys: Places,
    scores: Scores,
    aligned: bool,
    sinks: jax.Array | None = None,
    operation: Any = None,
) -> jax.Array:
    """Arguments as of `telamon.kernels.attention.attention`; `operation` is one of Tokamax's, none: that of the GPU."""
    assert aligned, "see refusal"
    del keys  # the queries' own
    gpu = gpus.gpu_of(target())
    if operation is None:
        from tokamax._src.ops.attention import api

        assert gpu is not None, "see refusal"
        operation = api.IMPLEMENTATIONS[_kernel(gpu, q.shape[-1])]
    local = functools.partial(_whole_rows, scores=scores, kernel=_Kernel(operation, scores.scale, scores.softcap, gpu))
    return rows.on_each_device(local, q, k, v, queries, sinks)


def _whole_rows(
    q: jax.Array, k: jax.Array, v: jax.Array, places: Places, sinks: jax.Array | None, *, scores: Scores, kernel: "_Kernel"
) -> jax.Array:
    """Attention of one device's rows and heads."""
    out = _flash(kernel, q, k, v, rows.first_keys(places, scores), sinks)
    # Padding sees itself in there. Its output is made zero, and so are its gradients.
    return jnp.where((places.segments > 0)[:, :, None, None], out, 0)


@dataclass(frozen=True)
class _Kernel:
    """One of Tokamax's kernels, and what is fixed when it is traced."""

    operation: Any
    scale: float
    softcap: float | None
    gpu: gpus.Gpu | None

    def bound(self, q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array) -> Any:
        """All arguments of the operation, for queries that see the keys from their `first` to themselves."""
        from tokamax._src.ops.attention.base import Mask

        mask = Mask(k_start=first[:, None], is_causal=True)
        return self.operation.bind(q, k, v, logits_scale=self.scale, logits_soft_cap=self.softcap, mask=mask)


# Tokamax's own pairing of forward and backward is traced when JAX comes to need it, at a time when what the libraries are told
# of the GPU is taken back already. Paired here, each is traced within what it is told.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(kernel: _Kernel, q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, sinks: jax.Array | None) -> jax.Array:
    return _forward(kernel, q, k, v, first, sinks)[0]


def _forward(kernel: _Kernel, q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, sinks: jax.Array | None) -> Any:
    with gpus.tokamax_as_on(kernel.gpu):
        bound = kernel.bound(q, k, v, first)
        out, statistics = kernel.operation(*bound.args, **{**bound.kwargs, "return_residuals": True})
    if sinks is not None:
        out, statistics = _with_sinks(out, statistics, sinks)
    out, statistics = checkpoint_name((out, statistics), SAVED)
    return out, (q, k, v, first, sinks, out, statistics)


def _with_sinks(out: jax.Array, statistics: Any, sinks_N: jax.Array) -> Any:
    """Output [B, T, N, H], and of each query the largest score and the sum of exponentials below it, with its head's sink among the scores."""
    top_BNT, total_BNT = statistics
    sinks_N1 = sinks_N.astype(jnp.float32)[:, None]
    new_top_BNT = jnp.maximum(top_BNT, sinks_N1)
    kept_BNT = total_BNT * jnp.exp(top_BNT - new_top_BNT)
    new_total_BNT = kept_BNT + jnp.exp(sinks_N1 - new_top_BNT)
    share_BTN1 = jnp.swapaxes(kept_BNT / new_total_BNT, 1, 2)[..., None]
    return (out.astype(jnp.float32) * share_BTN1).astype(out.dtype), (new_top_BNT, new_total_BNT)


def _backward(kernel: _Kernel, residuals: Any, d_out: jax.Array) -> Any:
    *inputs, sinks, out, (top_BNT, total_BNT) = residuals
    with gpus.tokamax_as_on(kernel.gpu):
        bound = kernel.bound(*inputs)
        gradients = kernel.operation.vjp((top_BNT, total_BNT), out, d_out, *bound.args, **bound.kwargs)
    d_sinks = None
    if sinks is not None:
        # As in `chunked`: the weight of a value of zero.
        delta_BNT = jnp.einsum("btnh,btnh->bnt", d_out, out, preferred_element_type=jnp.float32)
        weight_BNT = jnp.exp(sinks.astype(jnp.float32)[:, None] - top_BNT) / total_BNT
        d_sinks = -jnp.sum(weight_BNT * delta_BNT, axis=(0, 2)).astype(sinks.dtype)
    return gradients["q"], gradients["k"], gradients["v"], None, d_sinks


_flash.defvjp(_forward, _backward)


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("tokamax") is not None


def _kernel(gpu: gpus.Gpu, H: int) -> str:
    """Tokamax's name of the kernels for a GPU; Mosaic's backward pass is for these architectures and head sizes only."""
    largest = {9: 256, 10: 192}.get(gpu.capability[0], 0)
    return "mosaic_gpu" if largest >= H else "triton"
