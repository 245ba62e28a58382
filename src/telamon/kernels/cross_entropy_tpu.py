"""Cross-entropy on TPUs by Tokamax's kernel, in which logits never leave a core's fast memory.

It gives each token's loss and log-normaliser, and from the latter makes the logits again for the gradient: 8 products of the
size of the head where `cross_entropy` needs 6, and none of its traffic of logits. It cannot count which tokens were most
likely, so the sums have no `correct`.

Devices that split the vocabulary run it on their columns: log-normalisers are joined between the passes, and the backward
pass, given the joined ones, yields each device's share of the gradient.
"""

import functools
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from telamon.kernels.cross_entropy import CrossEntropy
from telamon.parallel.local import scatter_sum
from telamon.parallel.rules import ACTIVATION_RULES, WEIGHT_RULES
from telamon.parallel.target import Target

_MODULE = "tokamax._src.ops.linear_softmax_cross_entropy_loss.pallas_mosaic_tpu_kernel"

_ROOM = 40 << 20
"""Bytes of fast memory that blocks may take: enough for 1024 tokens by 1024 columns or more on any TPU. Larger blocks save
little traffic and take minutes to compile."""


@dataclass(frozen=True)
class Request:
    """What is asked of a cross-entropy, for whoever chooses a path. Sizes are those of the whole batch, over all devices."""

    target: Target
    """The device, and the mesh."""
    B: int
    T: int
    D: int
    V: int
    """Columns of the head."""
    vocab: int
    """Columns that stand for tokens."""
    dtype: str
    """Type of the hidden states."""
    z_loss: float = 0.0
    softcap: float | None = None


@functools.cache
def installed() -> bool:
    """Whether Tokamax is there, with this kernel."""
    try:
        return importlib.util.find_spec(_MODULE) is not None
    except ModuleNotFoundError:
        return False


def refusal(request: Request) -> str | None:
    """Why a request cannot be served; None: it can."""
    axes = _Axes.of(request.target.axes)
    if not installed():
        return "Tokamax is not installed (extra `tpu`)"
    if request.z_loss:
        return f"it has no z-loss (train.z_loss={request.z_loss})"
    if request.softcap is not None:
        return f"it has no cap on logits (softcap {request.softcap})"
    if request.vocab != request.V:
        return f"{request.V - request.vocab} columns of the head stand for no token, and it would give them a share"
    if request.dtype not in ("bfloat16", "float32"):
        return f"it computes in bfloat16 and float32, not in {request.dtype}"
    if request.D % 8:
        return f"the width {request.D} is not divisible by 8"
    for what, size, names in (("rows", request.B, axes.batch), ("positions", request.T, axes.seq), ("columns", request.V, axes.vocab)):
        if size % axes.extent(names):
            return f"{size} {what} do not split evenly over {axes.extent(names)} devices (mesh axes {', '.join(names)})"
    return None


def run(hidden: jax.Array, head: jax.Array, targets: jax.Array, mask: jax.Array) -> CrossEntropy:
    """Arguments as of `telamon.kernels.cross_entropy.cross_entropy`; without z-loss, the objective is the likelihood itself."""
    mesh = jax.sharding.get_abstract_mesh()
    nll = _summed(_Axes.of(tuple(mesh.shape.items())), hidden, head, targets, mask.astype(jnp.float32))
    return CrossEntropy(objective=nll, nll=jax.lax.stop_gradient(nll), correct=None)


class _Axes(NamedTuple):
    """The mesh's axes of more than one device, by what they split."""

    batch: tuple[str, ...]
    seq: tuple[str, ...]
    vocab: tuple[str, ...]
    embed: tuple[str, ...]
    """Splits the head's rows where it is kept; here rows are whole."""
    sizes: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, sizes: tuple[tuple[str, int], ...]) -> "_Axes":
        used = {name for name, size in sizes if size > 1}

        def split(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(name for name in names if name in used)

        uses = ACTIVATION_RULES
        return cls(split(uses["batch"]), split(uses["seq"]), split(uses["vocab"]), split(WEIGHT_RULES["embed"]), sizes)

    @property
    def tokens(self) -> tuple[str, ...]:
        return self.batch + self.seq

    def extent(self, names: tuple[str, ...]) -> int:
        """Devices along axes."""
        return math.prod(dict(self.sizes)[name] for name in names)

    def each(self, local: Callable[..., Any], inputs: tuple[str, ...], outputs: tuple[PartitionSpec, ...]) -> Callable[..., Any]:
        """`local` on each device's share; without a mesh of several, as it is. Inputs by name: hidden, head, rows, whole."""
        if self.extent(tuple(name for name, _ in self.sizes)) == 1:
            return local
        specs = {"hidden": self.hidden, "head": PartitionSpec(None, self.vocab or None), "rows": self.rows}
        return jax.shard_map(local, in_specs=tuple(specs[name] for name in inputs), out_specs=outputs, check_vma=False)

    @property
    def rows(self) -> PartitionSpec:
        """Of arrays [B, T]."""
        return PartitionSpec(self.batch or None, self.seq or None)

    @property
    def hidden(self) -> PartitionSpec:
        """Of hidden states [B, T, D]."""
        return PartitionSpec(self.batch or None, self.seq or None, None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed(axes: _Axes, hidden, head, targets, mask):
    return _forward(axes, hidden, head, targets, mask)[0]


def _forward(axes: _Axes, hidden, head, targets, mask):
    """The sum over tokens, and for the gradient each token's log-normaliser [B, T]."""

    def local(x_BTD, w_DV, y_BT, mask_BT):
        loss_M, log_z_M = _kernels().forward(x_BTD.reshape(-1, x_BTD.shape[-1]), _own(axes, y_BT.reshape(-1), w_DV), w_DV)
        # A device that has not the target gives the log-normaliser as the loss: as if the target's logit were 0.
        target_M = log_z_M - loss_M
        if axes.vocab:
            top_M = jax.lax.pmax(log_z_M, axes.vocab)
            log_z_M = top_M + jnp.log(jax.lax.psum(jnp.exp(log_z_M - top_M), axes.vocab))
            target_M = jax.lax.psum(target_M, axes.vocab)
        nll = jnp.sum(mask_BT.reshape(-1) * (log_z_M - target_M))
        return jax.lax.psum(nll, axes.tokens), log_z_M.reshape(y_BT.shape)

    run_local = axes.each(local, ("hidden", "head", "rows", "rows"), (PartitionSpec(), axes.rows))
    nll, log_z = run_local(hidden, head.astype(hidden.dtype), targets, mask)
    return nll, (hidden, head, targets, mask, log_z)


def _backward(axes: _Axes, residuals, d_nll):
    hidden, head, targets, mask, log_z = residuals
    # Summed over tokens, the head's gradient goes back to where its rows are kept, in shares if these divide it.
    scatter = axes.embed if head.shape[0] % axes.extent(axes.embed) == 0 and set(axes.embed) <= set(axes.tokens) else ()

    def local(x_BTD, w_DV, y_BT, d_BT, log_z_BT):
        x_MD, y_M, d_M, log_z_M = (x.reshape(-1, *x.shape[2:]) for x in (x_BTD, y_BT, d_BT, log_z_BT))
        d_x_MD, d_w_DV = _kernels().backward(d_M, log_z_M, x_MD, _own(axes, y_M, w_DV), w_DV)
        d_x_BTD = jax.lax.psum(d_x_MD.astype(x_MD.dtype).reshape(x_BTD.shape), axes.vocab)
        d_w_DV = jax.lax.psum(d_w_DV, tuple(name for name in axes.tokens if name not in scatter))
        return d_x_BTD, scatter_sum(d_w_DV, scatter, dim=0) if scatter else d_w_DV

    run_local = axes.each(
        local, ("hidden", "head", "rows", "rows", "rows"), (axes.hidden, PartitionSpec(scatter or None, axes.vocab or None))
    )
    d_hidden, d_head = run_local(hidden, head.astype(hidden.dtype), targets, mask * d_nll, log_z)
    return d_hidden, d_head.astype(head.dtype), None, None


_summed.defvjp(_forward, _backward)


def _own(axes: _Axes, targets: jax.Array, w_DV: jax.Array) -> jax.Array:
    """Targets as columns of this device's share of the head; -1 for those of others."""
    if not axes.vocab:
        return targets
    own = targets - jax.lax.axis_index(axes.vocab) * w_DV.shape[1]
    return jnp.where((own >= 0) & (own < w_DV.shape[1]), own, -1)


class _Kernels(NamedTuple):
    """Tokamax's two kernels with block sizes by its own rule, for x [M, D], columns of targets [M] and w [D, V]."""

    forward: Callable[..., Any]
    """(x, targets, w) -> loss [M], log-normaliser [M], in float32."""
    backward: Callable[..., Any]
    """(gradient of the losses [M], log-normaliser, x, targets, w) -> gradients of x and w, in float32."""


@functools.cache
def _kernels() -> _Kernels:
    kernel = importlib.import_module(_MODULE)

    def forward(x, targets, w):
        sizes = _blocks(kernel.get_heuristic_fwd_config, x, w)
        return kernel.linear_softmax_cross_entropy_loss_fwd_pallas_mosaic_tpu(x, targets, w, reduction="none", **sizes)

    def backward(d_loss, log_z, x, targets, w):
        sizes = _blocks(kernel.get_heuristic_bwd_config, x, w)
        return kernel.linear_softmax_cross_entropy_loss_bwd_pallas_mosaic_tpu(d_loss, log_z, x, targets, w, reduction="none", **sizes)

    return _Kernels(forward, backward)


def _blocks(rule: Callable[..., Any], x: Any, w: Any) -> dict[str, int]:
    """Sizes of blocks for x [M, D] and w [D, V], by Tokamax's rule for one of its kernels.

    The rule takes a divisor of V, however small. With fewer than 512 columns a block, activations are read and written so
    often that memory bounds the kernel; then blocks that run over the end are better, for a copy of w's gradient.
    """
    (M, D), V, room = x.shape, w.shape[1], {"dtype": x.dtype, "vmem_limit_bytes": _ROOM}
    config = rule(M, D, V, **room)
    if config.v_block_size < min(512, V):
        multiple = min(2048, -(-V // 128) * 128)
        config = rule(M, D, -(-V // multiple) * multiple, **room)
    return {"b_block_size": config.b_block_size, "h_block_size": config.h_block_size, "v_block_size": config.v_block_size}
