"""Attention on NVIDIA GPUs by cuDNN's fused kernel, through `jax.nn.dot_product_attention`.

The kernel knows causal order, and it skips what comes later. Documents, windows and chunks go in as a mask [B, 1, T, T], which JAX
turns into a bias in the type of the queries: 2 bytes a pair, 32 MiB a row at T 4096. cuDNN has other ways, and none of them serves:
a row packed with offsets needs the largest number of documents a row when the program is traced, and holds statistics of the
softmax that many times; its own window is not to be had together with a bias. So rows that are too long are refused.

XLA's compiler for GPUs takes this kernel's calls without cuDNN and without a GPU; what it cannot know then is the work space
that cuDNN asks for, which is missing in its account of memory.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp

from telamon.kernels import gpus
from telamon.kernels.attention import rows
from telamon.kernels.attention.rule import Places, Request, Scores, visible
from telamon.parallel.target import target

_MASK_BYTES = 1 << 29
"""Bytes of a device's mask above which the kernel is refused: 4 rows of 8192 tokens, or 16 of 4096."""

_ASSUMED = 91_000
"""cuDNN 9.10, of a machine that is not at hand: the oldest that JAX's wheels of today are built against."""


def refusal(request: Request) -> str | None:
    """Why a request cannot be served; None: it can."""
    gpu = gpus.gpu_of(request.target)
    mask = 2 * rows.rows_of_device(request) * request.T**2
    if gpu is None:
        return f"it is for NVIDIA's GPUs, and {request.target.device_kind or 'this device'} is not known as one"
    if gpu.here and (missing := _missing()):
        return missing
    if request.sinks:
        return "it has no sinks"
    if request.scores.softcap is not None:
        return "it has no cap on scores"
    if request.dtype not in ("bfloat16", "float16"):
        return f"it computes in bfloat16 and float16, not in {request.dtype}"
    largest = 256 if gpu.capability >= (9, 0) else 128
    if request.H % 8 or largest < request.H:
        return f"head_dim={request.H} is not a multiple of 8 up to {largest}, its largest on {gpu.device_kind}"
    if request.T % 2:
        return f"rows of {request.T} tokens are odd"
    if mask > _MASK_BYTES:
        return f"its mask would take {mask / 2**30:.1f} GiB a device, more than {_MASK_BYTES / 2**30:.1f} GiB"
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
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
    """Arguments as of `telamon.kernels.attention.attention`; `implementation` is JAX's, for tests without a GPU."""
    assert aligned and sinks is None and scores.softcap is None, "see refusal"
    del keys  # the queries' own
    local = functools.partial(_whole_rows, scores=scores, implementation=implementation)
    gpu = gpus.gpu_of(target())
    if implementation == "cudnn" and gpu is not None and not gpu.here:
        local = gpus.traced_within(functools.partial(_as_on, gpu), local)
    return rows.on_each_device(local, q, k, v, queries, sinks)


def _whole_rows(
    q: jax.Array, k: jax.Array, v: jax.Array, places: Places, sinks: None, *, scores: Scores, implementation: Literal["cudnn", "xla"]
):
    """Attention of one device's rows and heads."""
    del sinks
    wide, width = max(q.shape[-1], v.shape[-1]), v.shape[-1]
    q, k, v = (_widened(x, wide) for x in (q, k, v))  # cuDNN would take other values than keys on some GPUs; JAX's function takes none
    # Padding sees itself in there, for a softmax over something. Its output is made zero, and so are its gradients.
    itself = jnp.eye(q.shape[1], dtype=bool)
    mask = (visible(places, places, scores.window, scores.chunk) | itself)[:, None]
    out = jax.nn.dot_product_attention(q, k, v, mask=mask, scale=scores.scale, is_causal=True, implementation=implementation)
    return jnp.where((places.segments > 0)[:, :, None, None], out[..., :width], 0)


def _widened(x: jax.Array, width: int) -> jax.Array:
    """Zeros behind the features: they add nothing to a score, and stay zeros in what a query gets."""
    return jnp.pad(x, [(0, 0)] * 3 + [(0, width - x.shape[-1])]) if x.shape[-1] < width else x


def _missing() -> str | None:
    from jax._src.cudnn import fused_attention_stablehlo as fused

    try:
        fused.check_cudnn_version()
    except RuntimeError as error:
        return f"JAX finds no cuDNN here ({error}); the extra `cuda13` brings it"
    return None


def _as_on(gpu: gpus.Gpu):
    """A context in which JAX takes this machine for one with that GPU and cuDNN."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    return gpus.answering(
        (fused, "check_cudnn_version", lambda: _ASSUMED),
        (fused, "check_compute_capability", lambda wanted: gpu.capability >= tuple(int(part) for part in wanted.split("."))),
        (fused, "is_cuda_compute_capability_equal", lambda wanted: gpu.compute_capability == wanted),
    )
