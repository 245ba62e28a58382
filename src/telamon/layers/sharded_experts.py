"""Experts on a mesh: each device sorts its own tokens, rows travel to the devices that own their experts, and what is made of them back.

An owner works on its experts in blocks. Of a block it gathers the parts that devices along `fsdp` own, in the compute type; the block's
gradient, in float32, is summed over devices before the next block's begins, and each is left its part. So a device holds whole
matrices, and whole gradients, of one block at a time. Of rows it holds those of a turn (see `telamon.parallel.experts`).

The backward pass sends rows once more and makes the gate and the upper map again, whatever else is kept of a forward pass.
What a token's weights get is read off the hidden rows: <dy, W h> = <Wᵀ dy, h>, so the lower map is not made again.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from telamon.kernels import experts as grouped
from telamon.layers.dispatch import By, by_expert
from telamon.layers.mlp import gated
from telamon.parallel.experts import AXIS, Travel, Turn, Turns
from telamon.parallel.local import block_size, scatter_sum
from telamon.parallel.rules import ACTIVATION_RULES, extent, spec, weight_partition

BLOCK_BYTES = 2**30
"""Of the float32 gradients of a block of experts."""


class ExpertWeights[T](NamedTuple):
    """The three maps of all experts, and their biases or None: the arrays, or what is to be said of each."""

    gate: T
    up: T
    down: T
    gate_bias: T | None = None
    up_bias: T | None = None
    down_bias: T | None = None


AXES = {
    "gate": ("experts", "embed", "mlp"),
    "up": ("experts", "embed", "mlp"),
    "down": ("experts", "mlp", "embed"),
    "gate_bias": ("experts", "mlp"),
    "up_bias": ("experts", "mlp"),
    "down_bias": ("experts", "norm"),
}
"""Logical axes of each."""


@dataclass(frozen=True)
class Kind:
    """What experts compute, beside their weights."""

    activation: str
    limit: float | None
    weigh_input: bool
    """A choice's weight multiplies what an expert is given, and not what it gives."""
    path: str
    """Of the grouped matmul."""


def shared(shape: tuple[int, ...]) -> bool:
    """Whether the mesh in use shares the rows of activations [B, T, D] evenly between devices."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return False
    return all(size % extent(mesh, ACTIVATION_RULES[axis]) == 0 for axis, size in zip(("batch", "seq"), shape, strict=False))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def on_devices(kind: Kind, x: jax.Array, experts: jax.Array, weights: jax.Array, w: ExpertWeights[jax.Array]) -> jax.Array:
    """What a mixture makes of tokens, on a mesh for which `shared` holds.

    Args:
        kind: what experts compute.
        x: tokens [B, T, D].
        experts: the choices of each [B, T, X], E for nobody.
        weights: their weights [B, T, X], float32, 0 for nobody.
        w: of all experts, in float32.

    Returns:
        [B, T, D] in the type of x.
    """
    return _forward(kind, x, experts, weights, w)[0]


def _forward(kind: Kind, x: jax.Array, experts: jax.Array, weights: jax.Array, w: ExpertWeights[jax.Array]) -> tuple[jax.Array, tuple]:
    owned = _Owned.of(w)

    def on_device(x: jax.Array, experts: jax.Array, weights: jax.Array, w: ExpertWeights[jax.Array]) -> jax.Array:
        own = _Device(kind, owned, x, experts, weights, w)
        return own.made().reshape(x.shape)

    ins = (owned.rows, owned.rows, owned.rows, owned.parts)
    y = jax.shard_map(on_device, in_specs=ins, out_specs=owned.rows, check_vma=False)(x, experts, weights, w)
    return checkpoint_name(y, grouped.SAVED), (x, experts, weights, w)


def _backward(kind: Kind, residuals: tuple, dy: jax.Array) -> tuple:
    x, experts, weights, w = residuals
    owned = _Owned.of(w)

    def on_device(x: jax.Array, experts: jax.Array, weights: jax.Array, w: ExpertWeights[jax.Array], dy: jax.Array) -> tuple:
        own = _Device(kind, owned, x, experts, weights, w)
        dx, d_weights, dw = own.gradients(dy.reshape(own.x.shape))
        return dx.reshape(x.shape), d_weights.reshape(weights.shape), dw

    ins, outs = (owned.rows, owned.rows, owned.rows, owned.parts, owned.rows), (owned.rows, owned.rows, owned.parts)
    dx, d_weights, dw = jax.shard_map(on_device, in_specs=ins, out_specs=outs, check_vma=False)(x, experts, weights, w, dy)
    return dx, None, d_weights, dw


on_devices.defvjp(_forward, _backward)


@dataclass(frozen=True)
class _Owned:
    """Which parts of the experts' weights a device owns."""

    parts: ExpertWeights[PartitionSpec]
    """Partition of each."""

    @classmethod
    def of(cls, w: ExpertWeights[jax.Array]) -> "_Owned":
        mesh = jax.sharding.get_abstract_mesh()
        return cls(_each(lambda name, x: weight_partition(mesh, AXES[name], x.shape), w))

    @property
    def rows(self) -> PartitionSpec:
        """Of tokens."""
        return spec(("batch", "seq", None), ACTIVATION_RULES)

    @property
    def summed(self) -> tuple[str, ...]:
        """Mesh axes whose devices have tokens of their own for the same experts."""
        sizes = jax.sharding.get_abstract_mesh().shape
        return tuple(name for axis in ("batch", "seq") for name in ACTIVATION_RULES[axis] if name != AXIS and sizes[name] > 1)

    def along(self, weight: str, dim: int) -> tuple[str, ...]:
        """Mesh axes of those that split a dim of a weight."""
        part = getattr(self.parts, weight)[dim]
        names = () if part is None else (part,) if isinstance(part, str) else part
        return tuple(name for name in names if name in self.summed)

    @property
    def split_width(self) -> bool:
        """Whether devices along `tensor` have a part of each expert's hidden width."""
        return "tensor" in (self.parts.gate[2] or ())

    def gathered(self, w: ExpertWeights[jax.Array], dtype: Any) -> ExpertWeights[jax.Array]:
        """A block's weights, each from the parts that devices own."""

        def whole(name: str, x: jax.Array) -> jax.Array:
            x = x.astype(dtype)
            for dim in range(x.ndim):
                if names := self.along(name, dim):
                    x = jax.lax.all_gather(x, names, axis=dim, tiled=True)
            return x

        return _each(whole, w)

    def scattered(self, dw: ExpertWeights[jax.Array]) -> ExpertWeights[jax.Array]:
        """The sum over devices of a block's gradients, of which each gets the parts that it owns."""

        def part(name: str, x: jax.Array) -> jax.Array:
            rest = set(self.summed)
            for dim in range(x.ndim):
                if names := self.along(name, dim):
                    x, rest = scatter_sum(x, names, dim=dim, most=None), rest - set(names)
            return jax.lax.psum(x, tuple(name for name in self.summed if name in rest))

        return _each(part, dw)

    def total(self, x: Any) -> Any:
        """The sum over the parts of hidden widths."""
        return jax.lax.psum(x, "tensor") if self.split_width else x


class _Device:
    """One device's tokens and its parts of weights, inside of a `shard_map` over all mesh axes."""

    def __init__(self, kind: Kind, owned: _Owned, x: jax.Array, experts: jax.Array, weights: jax.Array, w: ExpertWeights[jax.Array]):
        self.kind, self.owned = kind, owned
        self.x, self.weights = x.reshape(-1, x.shape[-1]), weights.reshape(-1, weights.shape[-1])
        M, X = self.weights.shape
        peers, parts = jax.lax.axis_size(AXIS), jax.lax.axis_size(owned.along("gate", 0))
        own, whole = len(w.gate), w.gate[0].size * 4
        for dim in range(3):
            whole *= jax.lax.axis_size(owned.along("gate", dim))
        each = block_size(own, 3 * whole, most=BLOCK_BYTES)
        turns = Turns.of(
            peers=peers, blocks=own // each, size=parts * each, tokens=M, choices=X, row_bytes=self.x.shape[1] * self.x.dtype.itemsize
        )
        self.w = _each(lambda _, x: x.reshape(turns.blocks, each, *x.shape[1:]), w)
        # A gathered block holds `each` experts of every part: not those that come one after the other where there are several parts.
        slots = np.arange(peers * own * parts).reshape(peers, turns.blocks, parts, each).swapaxes(1, 2).reshape(-1)
        self.by: By = by_expert(jnp.append(slots, len(slots)).astype(jnp.int32)[experts.reshape(-1, X)], len(slots))
        axes = tuple(jax.sharding.get_abstract_mesh().axis_names)
        self.travel = Travel.of(turns, self.by.order, self.by.sizes, axes)

    def made(self) -> jax.Array:
        """What the experts make of each token [M, D]."""
        travel = self.travel

        def block(rows: jax.Array, part: tuple[jax.Array, ExpertWeights[jax.Array]]) -> tuple[jax.Array, None]:
            number, w = part[0], self.owned.gathered(part[1], self.x.dtype)

            def turn(index: jax.Array, rows: jax.Array) -> jax.Array:
                turn = travel.turn(number, index)
                return turn.back(self._block(w, turn).made(turn.out(self._given(turn))), rows)

            return jax.lax.fori_loop(0, travel.count(number), turn, rows), None

        rows = jax.lax.scan(block, self._rows(self.x.shape[1], self.x.dtype), (jnp.arange(travel.turns.blocks), self.w))[0]
        y = jnp.zeros(self.x.shape, jnp.float32)
        for choice, at in enumerate(self._at):  # in a fixed order, so that repeats are equal to the bit
            made = rows[at].astype(jnp.float32)
            y += made if self.kind.weigh_input else self.weights[:, choice, None] * made
        return self.owned.total(y.astype(self.x.dtype))

    def gradients(self, dy: jax.Array) -> tuple[jax.Array, jax.Array, ExpertWeights[jax.Array]]:
        """For dy [M, D] the gradients of tokens [M, D], of their weights [M, X] and of the parts of experts that are this device's."""
        travel, X = self.travel, self.weights.shape[1]

        def block(made: tuple, part: tuple[jax.Array, ExpertWeights[jax.Array]]) -> tuple[tuple, ExpertWeights[jax.Array]]:
            number, w = part[0], self.owned.gathered(part[1], self.x.dtype)

            def turn(index: jax.Array, state: tuple) -> tuple:
                d_rows, d_weights, dw = state
                turn = travel.turn(number, index)
                weights = None if self.kind.weigh_input else turn.out(self.weights.reshape(-1)[turn.choices])
                found = self._block(w, turn).gradients(turn.out(self._given(turn)), turn.out(dy[turn.choices // X]), weights)
                d_weights = d_weights if found[1] is None else turn.back(found[1], d_weights)
                return turn.back(found[0], d_rows), d_weights, jax.tree.map(jnp.add, dw, found[2])

            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), w)
            d_rows, d_weights, dw = jax.lax.fori_loop(0, travel.count(number), turn, (*made, zeros))
            return (d_rows, d_weights), self.owned.scattered(dw)

        start = self._rows(self.x.shape[1], self.x.dtype), self._rows(None, jnp.float32)
        (d_rows, d_weight_rows), dw = jax.lax.scan(block, start, (jnp.arange(travel.turns.blocks), self.w))
        dx, d_weights = jnp.zeros(self.x.shape, jnp.float32), []
        for choice, at in enumerate(self._at):
            d_given = d_rows[at].astype(jnp.float32)
            if self.kind.weigh_input:
                d_weights.append(jnp.sum(self.x * d_given, axis=-1))
                d_given *= self.weights[:, choice, None]
            else:
                d_weights.append(d_weight_rows[at])
            dx += d_given
        dx, d_weights = self.owned.total((dx.astype(self.x.dtype), jnp.stack(d_weights, axis=1)))
        return dx, d_weights, _each(lambda _, x: x.reshape(-1, *x.shape[2:]), dw)

    def _rows(self, width: int | None, dtype: Any) -> jax.Array:
        """Zeros for all sorted rows, and room for a turn that ends behind them."""
        return jnp.zeros((len(self.by.order) + self.travel.turns.rows, *(() if width is None else (width,))), dtype)

    @property
    def _at(self) -> jax.Array:
        """The sorted row of each token's choices [X, M]."""
        return self.by.inverse.reshape(self.weights.shape).T

    def _given(self, turn: Turn) -> jax.Array:
        """Rows of a turn as they leave their device."""
        rows = self.x[turn.choices // self.weights.shape[1]]
        return rows * self.weights.reshape(-1)[turn.choices, None].astype(rows.dtype) if self.kind.weigh_input else rows

    def _block(self, w: ExpertWeights[jax.Array], turn: Turn) -> "_Block":
        return _Block(self.kind, w, turn, first=jax.lax.axis_index("tensor") == 0 if self.owned.split_width else True)


class _Block:
    """A block of experts at work on rows that are sorted by expert."""

    def __init__(self, kind: Kind, w: ExpertWeights[jax.Array], turn: Turn, *, first: Any):
        """`first`: whether this device adds the last bias; those that share a hidden width must not all do so."""
        self.kind, self.w, self.turn, self.first = kind, w, turn, first
        G, D, F = w.gate.shape
        M = len(turn.experts)
        self.path = grouped.path_for(M, D, F, G, dtype=str(w.gate.dtype), path=kind.path)

    def made(self, x: jax.Array) -> jax.Array:
        """[M, D] -> [M, D]."""
        hidden = gated(self.kind.activation, self.kind.limit, *self._inner(x))
        return self._biased(self._product(hidden, self.w.down), self.w.down_bias, self.first)

    def gradients(
        self, x: jax.Array, dy: jax.Array, weights: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None, ExpertWeights[jax.Array]]:
        """Gradients of x [M, D], of weights [M] and, in float32, of experts, for what reaches the token that each row goes to [M, D].

        Weights multiply what is made; None: they do not.
        """
        hidden, pullback = jax.vjp(functools.partial(gated, self.kind.activation, self.kind.limit), *self._inner(x))
        d_hidden = self._product(dy, self.w.down, transposed=True)
        weighted, d_weights = hidden, None
        if weights is not None:
            d_weights = jnp.sum(d_hidden.astype(jnp.float32) * hidden.astype(jnp.float32), axis=-1)
            if self.w.down_bias is not None:
                bias = self._biased(jnp.zeros_like(dy), self.w.down_bias, self.first)
                d_weights += jnp.sum(dy.astype(jnp.float32) * bias.astype(jnp.float32), axis=-1)
            weighted, d_hidden = (x * weights[:, None].astype(x.dtype) for x in (hidden, d_hidden))
        d_gate, d_up = pullback(d_hidden)
        dx = self._product(d_gate, self.w.gate, transposed=True) + self._product(d_up, self.w.up, transposed=True)
        dw = [self._weight_gradient(*pair) for pair in ((x, d_gate), (x, d_up), (weighted, dy))]
        if self.w.down_bias is not None:
            d_made = dy if weights is None else dy * weights[:, None].astype(dy.dtype)
            dw += [self._bias_gradient(d) for d in (d_gate, d_up, d_made)]
        return dx, d_weights, ExpertWeights(*dw)

    def _inner(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        gate = self._biased(self._product(x, self.w.gate), self.w.gate_bias)
        return gate, self._biased(self._product(x, self.w.up), self.w.up_bias)

    def _product(self, x: jax.Array, w: jax.Array, *, transposed: bool = False) -> jax.Array:
        return self.path.product(x, w, self.turn.sizes, transposed=transposed)

    def _weight_gradient(self, x: jax.Array, dy: jax.Array) -> jax.Array:
        return self.path.weight_gradient(x, dy, self.turn.sizes)

    def _biased(self, x: jax.Array, bias: jax.Array | None, added: Any = True) -> jax.Array:
        """Rows with the bias of their expert; of a row of nobody any."""
        if bias is None:
            return x
        return x + jnp.where(added, bias[jnp.minimum(self.turn.experts, len(bias) - 1)].astype(x.dtype), 0)

    def _bias_gradient(self, d: jax.Array) -> jax.Array:
        """The sum of each expert's rows, [M, N] -> [G, N]: a product, which adds in a fixed order."""
        own = jax.nn.one_hot(self.turn.experts, len(self.turn.sizes), axis=0, dtype=jnp.float32)
        return jnp.matmul(own, d.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)


def _each(function: Callable[[str, Any], Any], w: ExpertWeights[Any]) -> ExpertWeights[Any]:
    """`function` of the name and the array of each weight that there is."""
    return ExpertWeights(**{name: function(name, x) for name, x in w._asdict().items() if x is not None})
