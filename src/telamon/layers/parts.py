"""What a mixer and an ffn are: frozen configs found by `kind` in an open registry, each of which builds its module.

A family file or a user's module adds its own::

    @register
    class MyMixer(MixerConfig):
        kind: str = "my_mixer"
        def build(self, *, d_model: int, n_layers: int, rngs: nnx.Rngs) -> Mixer: ...
"""

import abc
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import nnx
from pydantic import BeforeValidator, SerializeAsAny

from telamon.config.schema import Section


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Load:
    """How a layer's tokens spread over its experts: sums over tokens, to be added over microbatches and kept by layer."""

    counts: jax.Array
    """Choices of each expert [E], float32, without gradient; they sum to X times the tokens."""
    probabilities: jax.Array
    """Sum of the tokens' probabilities [E]."""
    tokens: jax.Array
    """Tokens counted, float32 scalar."""


Aux = dict[str, "tuple[jax.Array, jax.Array] | Load"]
"""Named auxiliary terms as (sum, denominator) pairs of scalars, added up over layers; and of a mixture of experts its `load`."""


@dataclass(frozen=True)
class HowExperts:
    """How mixtures of experts are run, as opposed to what they are."""

    path: str = "auto"
    """What computes them (see `telamon.layers.moe`)."""
    capacity_factor: float = 1.25
    """Of `capacity`: places of an expert in a row, over the number that an even load would take."""
    jitter: float = 0.0
    """Routers see their input times random factors from 1 - jitter to 1 + jitter, where the call has a key."""
    by_document: bool = False
    """Give the balance within each document as a term of the loss."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
    """What every layer may read. Queries are this call's tokens; keys are the cache's when there is one, else the queries.

    A query sees a key when both are real (segment > 0), in the same segment, and the key's position is not later. That one
    rule serves packed rows, left and right padding, prefill and decode.
    """

    tokens: jax.Array
    """Token ids [B, T]."""
    positions: jax.Array
    """Positions within the document [B, T]."""
    segments: jax.Array
    """Document of each query within its row [B, T], 0 for padding."""
    key_positions: jax.Array
    """Positions of the keys [B, S]."""
    key_segments: jax.Array
    """Documents of the keys [B, S], 0 for padding and for slots not yet written."""
    write_index: jax.Array | None = None
    """First cache slot that this call writes; None without a cache."""
    attention: str = field(default="auto", metadata={"static": True})
    """Path of attention (see `telamon.kernels.attention`)."""
    experts: HowExperts = field(default=HowExperts(), metadata={"static": True})
    """How mixtures of experts are run."""
    counted: jax.Array | None = None
    """Tokens [B, T] that loads and losses of routers are over, if real; None: all real ones."""
    key: jax.Array | None = None
    """Random key of this layer in training; None: nothing is random."""
    shared: dict[str, Any] = field(default_factory=dict)
    """What mixers made of all this once for every layer (see `MixerConfig.prepare`)."""
    shared_from: tuple[jax.Array | None, ...] = ()
    """The arrays that it was made from."""

    def prepared(self, mixers: Iterable["MixerConfig"]) -> "Context":
        """With what these mixers share."""
        shared = {name: value for mixer in mixers for name, value in mixer.prepare(self).items()}
        # Finished here: the compiler would otherwise be free to make it again in each layer.
        return replace(self, shared=jax.lax.optimization_barrier(shared), shared_from=self._arrays())

    def shared_by(self, mixer: "MixerConfig", name: str) -> Any:
        """What a mixer shares under a name; made here where it was not for these very arrays.

        So it is for a layer that is run by itself, and for one within a mixer that has it see other positions, or that no pattern names.
        """
        same = len(self.shared_from) > 0 and all(mine is theirs for mine, theirs in zip(self._arrays(), self.shared_from, strict=True))
        return self.shared[name] if same and name in self.shared else mixer.prepare(self)[name]

    def _arrays(self) -> tuple[jax.Array | None, ...]:
        return self.tokens, self.positions, self.segments, self.key_positions, self.key_segments, self.write_index


@dataclass(frozen=True)
class LayerCache:
    """What one layer keeps between calls, as part of the arrays of its whole stack.

    Only what is new is written, at its place in the stack's array: in a compiled loop that costs no copy of what was there.
    """

    stacked: dict[str, jax.Array]
    """Arrays of all layers, each with the layer's dimension first."""
    layer: jax.Array
    """Which layer this is, int32 scalar."""

    def __getitem__(self, name: str) -> jax.Array:
        """This layer's array, of the shape that `MixerConfig.cache_shapes` says."""
        return jax.lax.dynamic_index_in_dim(self.stacked[name], self.layer, keepdims=False)

    def write(self, new: dict[str, jax.Array], *, dim: int, index: jax.Array) -> "LayerCache":
        """The cache with `new` from place `index` on along `dim` of this layer's arrays, in the type of the cache."""
        written = {}
        for name, x in new.items():
            start = [jnp.zeros((), jnp.int32)] * (x.ndim + 1)
            start[0], start[dim + 1] = self.layer, index
            written[name] = jax.lax.dynamic_update_slice(self.stacked[name], x[None].astype(self.stacked[name].dtype), start)
        # Finished before it is read: fused with the reading, the write would happen twice, once on a copy of the whole.
        return LayerCache(self.stacked | jax.lax.optimization_barrier(written), self.layer)


class PartConfig(Section, abc.ABC):
    """A part of a block, described as data."""

    kind: str

    @abc.abstractmethod
    def build(self, *, d_model: int, n_layers: int, rngs: nnx.Rngs) -> nnx.Module:
        """The module for a stream of width `d_model`; `n_layers` scales the initial size of what is added to the stream."""


class MixerConfig(PartConfig):
    """Mixes positions. Its module is `(x [B, T, D], ctx, LayerCache | None) -> (y [B, T, D], LayerCache | None, Aux)`."""

    @abc.abstractmethod
    def cache_shapes(self, *, batch: int, length: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the arrays the mixer keeps between calls, for `length` positions."""

    def prepare(self, ctx: Context) -> dict[str, Any]:
        """Arrays that all layers with these settings read, made once a call and not once a layer.

        Each has a name that says all that it depends on beside the context, since mixers with the same name share it.
        """
        return {}

    @property
    def attention_sizes(self) -> tuple[int, int, int]:
        """Query heads, features of a key and features of a value; zeros for a mixer without attention."""
        return 0, 0, 0

    @property
    def attention_width(self) -> float:
        """Query heads times head size, the mean of a key's and a value's, for the FLOPs rule."""
        heads, key, value = self.attention_sizes
        return heads * (key + value) / 2

    @property
    def attention_window(self) -> int | None:
        """Keys a query sees at most, itself included, in positions; None: all before it."""
        return None

    @property
    def attention_chunk(self) -> int | None:
        """Positions that a query sees no further than: those of its own chunk of this many; None: there are no chunks."""
        return None


class FfnConfig(PartConfig):
    """Acts on each position alone. Its module is `(x [B, T, D], ctx) -> (y [B, T, D], Aux)`."""

    @property
    def has_experts(self) -> bool:
        """Whether it is run as `Context.experts` says."""
        return False


_PARTS: dict[str, type[PartConfig]] = {}


def register[P: type[PartConfig]](cls: P) -> P:
    """Class decorator: makes a part known by the default of its `kind`."""
    kind = cls.model_fields["kind"].default
    known = _PARTS.get(kind)
    if known is not None and known.__qualname__ != cls.__qualname__:
        raise ValueError(f"a part of kind {kind!r} is registered already: {known.__module__}.{known.__qualname__}")
    _PARTS[kind] = cls
    return cls


def _by_kind(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    kind = value.get("kind")
    if kind not in _PARTS:
        raise ValueError(f"no part of kind {kind!r}; known: {', '.join(sorted(_PARTS))}")
    return _PARTS[kind].model_validate(value)


AnyMixer = Annotated[SerializeAsAny[MixerConfig], BeforeValidator(_by_kind)]
AnyFfn = Annotated[SerializeAsAny[FfnConfig], BeforeValidator(_by_kind)]
