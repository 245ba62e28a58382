"""Cross-entropy on TPUs by Tokamax's kernel, in which logits never leave a core's fast memory.

It gives each token's loss and log-normaliser, and from the latter makes the logits again for the gradient: 8 products of the
size of the head where `cross_entropy` needs 6, and none of its traffic of logits. It cannot count which tokens were most
likely, so the sums have no `correct`.

It runs on blocks of columns, one after the other, and on devices that split the vocabulary on their own: log-normalisers are
joined between the passes, and the backward pass, given the joined ones, yields each block's share of the gradient. So neither
the head nor its gradient is ever whole on a device.
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
from telamon.parallel import local
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

    def each(self, on_one: Callable[..., Any], ins: tuple[PartitionSpec, ...], outs: tuple[PartitionSpec, ...]) -> Callable[..., Any]:
        """`on_one` on each device's share; without a mesh of several, as it is."""
        if self.extent(tuple(name for name, _ in self.sizes)) == 1:
            return on_one
        return jax.shard_map(on_one, in_specs=ins, out_specs=outs, check_vma=False)

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
    rows = _HeadRows.of(axes, head)

    def on_one(x_BTD, w_DV, y_BT, mask_BT):
        x_MD, y_M = x_BTD.reshape(-1, x_BTD.shape[-1]), _own(axes, y_BT.reshape(-1), w_DV)

        def join(joined, start):
            log_z_M, target_M = joined
            block_DV = rows.gathered(w_DV, start)
            loss_M, block_log_z_M = _kernels().forward(x_MD, _within(y_M, start, block_DV.shape[1]), block_DV)
            # A block that has not the target gives the log-normaliser as the loss: as if the target's logit were 0.
            return (jnp.logaddexp(log_z_M, block_log_z_M), target_M + block_log_z_M - loss_M), None

        nothing = jnp.full(y_M.shape, -jnp.inf), jnp.zeros(y_M.shape)
        (log_z_M, target_M), _ = jax.lax.scan(join, nothing, rows.starts)
        if axes.vocab:
            top_M = jax.lax.pmax(log_z_M, axes.vocab)
            log_z_M = top_M + jnp.log(jax.lax.psum(jnp.exp(log_z_M - top_M), axes.vocab))
            target_M = jax.lax.psum(target_M, axes.vocab)
        nll = jnp.sum(mask_BT.reshape(-1) * (log_z_M - target_M))
        return jax.lax.psum(nll, axes.tokens), log_z_M.reshape(y_BT.shape)

    mapped = axes.each(on_one, (axes.hidden, rows.partition, axes.rows, axes.rows), (PartitionSpec(), axes.rows))
    nll, log_z = mapped(hidden, head.astype(hidden.dtype), targets, mask)
    return nll, (hidden, head, targets, mask, log_z)


def _backward(axes: _Axes, residuals, d_nll):
    hidden, head, targets, mask, log_z = residuals
    rows = _HeadRows.of(axes, head)

    def on_one(x_BTD, w_DV, y_BT, d_BT, log_z_BT):
        x_MD, y_M, d_M, log_z_M = (x.reshape(-1, *x.shape[2:]) for x in (x_BTD, y_BT, d_BT, log_z_BT))
        y_M = _own(axes, y_M, w_DV)

        def add(d_x_MD, start):
            block_DV = rows.gathered(w_DV, start)
            columns_M = _within(y_M, start, block_DV.shape[1])
            more_MD, d_block_DV = _kernels().backward(d_M, log_z_M, x_MD, columns_M, block_DV)
            return d_x_MD + more_MD, rows.summed(d_block_DV)

        d_x_MD, d_blocks = jax.lax.scan(add, jnp.zeros(x_MD.shape, jnp.float32), rows.starts)
        d_w_DV = jnp.moveaxis(d_blocks, 0, 1).reshape(w_DV.shape)
        return jax.lax.psum(d_x_MD.astype(x_MD.dtype).reshape(x_BTD.shape), axes.vocab), d_w_DV

    ins = (axes.hidden, rows.partition, axes.rows, axes.rows, axes.rows)
    mapped = axes.each(on_one, ins, (axes.hidden, rows.partition))
    d_hidden, d_head = mapped(hidden, head.astype(hidden.dtype), targets, mask * d_nll, log_z)
    return d_hidden, d_head.astype(head.dtype), None, None


class _HeadRows(NamedTuple):
    """How a device has the head [D, V]: its own rows, of which all devices make a block of columns whole when it is needed."""

    axes: _Axes
    split: tuple[str, ...]
    """Mesh axes that split the rows; none where rows do not divide, or these axes do not also split tokens."""
    starts: jax.Array
    """First column of each block."""
    size: int
    """Columns of a block."""

    @classmethod
    def of(cls, axes: _Axes, head: jax.Array) -> "_HeadRows":
        D, V = head.shape[0], head.shape[1] // axes.extent(axes.vocab)
        split = axes.embed if D % axes.extent(axes.embed) == 0 and set(axes.embed) <= set(axes.tokens) else ()
        size = _columns(D, V)
        return cls(axes, split, jnp.arange(0, V, size), size)

    @property
    def partition(self) -> PartitionSpec:
        return PartitionSpec(self.split or None, self.axes.vocab or None)

    def gathered(self, w_DV: jax.Array, start: jax.Array) -> jax.Array:
        """A block of columns, with the rows of all devices."""
        block_DV = jax.lax.dynamic_slice_in_dim(w_DV, start, self.size, axis=1)
        return jax.lax.all_gather(block_DV, self.split, axis=0, tiled=True) if self.split else block_DV

    def summed(self, d_block_DV: jax.Array) -> jax.Array:
        """A block's gradient summed over tokens, of which each device gets its rows."""
        d_block_DV = jax.lax.psum(d_block_DV, tuple(name for name in self.axes.tokens if name not in self.split))
        return local.scatter_sum(d_block_DV, self.split, dim=0) if self.split else d_block_DV


def _columns(D: int, V: int) -> int:
    """Columns of a block of the head: the most in whole lanes that divide V and whose gradient, needed when all
    saved activations are there, stays within `local.BLOCK_BYTES`; V if none do."""
    fitting = [size for size in range(128, V, 128) if V % size == 0 and 4 * D * size <= local.BLOCK_BYTES]
    return V if 4 * D * V <= local.BLOCK_BYTES else max(fitting, default=V)


def _within(columns: jax.Array, start: jax.Array, size: int) -> jax.Array:
    """Columns counted from a block's first; -1 for those of other blocks."""
    return jnp.where((columns >= start) & (columns < start + size), columns - start, -1)


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
