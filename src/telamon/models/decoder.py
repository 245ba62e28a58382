"""The decoder: embed, stacks of blocks, norm, head. One forward serves training, prefill and decoding."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from telamon.kernels import attention, experts
from telamon.kernels.cross_entropy import capped
from telamon.kernels.embedding import look_up
from telamon.layers.param import table
from telamon.layers.parts import Aux, Context, HowExperts, LayerCache, Load
from telamon.models.mtp import Predictor, follows, later
from telamon.models.spec import BlockSpec, ModelSpec, StackSpec
from telamon.parallel.rules import constrain

BLOCK_INPUT = "block_input"
"""Name of the stream before each repeat of a stack, for `REMAT_POLICIES`."""

REMAT_POLICIES = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    # Kernels and loops hide their products: what those of attention and of experts give is kept by name.
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(attention.SAVED, experts.SAVED),
    ),
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=[BLOCK_INPUT], offload_src="device", offload_dst="pinned_host"
    ),
}


@dataclass(frozen=True)
class Numerics:
    """How a model is run, as opposed to what it is."""

    dtype: str = "float32"
    """Type of activations."""
    remat: Literal["none", "full", "dots", "offload"] = "none"
    """What the backward pass makes again (a name of `REMAT_POLICIES`)."""
    attention: str = "auto"
    """Path of attention over rows of training (see `telamon.kernels.attention`)."""
    experts: HowExperts = field(default_factory=HowExperts)
    """How mixtures of experts are run."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """What a model keeps between calls while it generates."""

    layers: list
    """For each stack, for each block of its pattern, the mixer's arrays with a leading layer axis."""
    positions: jax.Array
    """Positions of the slots' tokens [B, S]."""
    segments: jax.Array
    """1 where a slot holds a real token, 0 for padding and for slots not yet written [B, S]."""
    length: jax.Array
    """Slots written so far, int32 scalar."""


@dataclass(frozen=True)
class Output:
    """What a forward gives."""

    hidden: jax.Array
    """Normed hidden states [B, T, D], to be turned into logits by `Decoder.logits`."""
    cache: Cache | None
    """The cache with this call's tokens, where one was given."""
    aux: dict[str, tuple[jax.Array, jax.Array]]
    """Auxiliary terms, summed over layers."""
    loads: dict[str, Load]
    """Of each mixture of experts, under its dotted path, how tokens spread over them; with a leading layer axis in stacks."""


@dataclass(frozen=True)
class Further:
    """What the model says of tokens beyond the next (see `Decoder.further`)."""

    hidden: tuple[jax.Array, ...]
    """For each depth k from 1 on, normed hidden states [B, T, D]: place i predicts the token at i + k + 1, if `follows` says it can."""
    aux: dict[str, tuple[jax.Array, jax.Array]]
    loads: dict[str, Load]
    """As of `Output`, and of nothing but these depths."""


class Block(nnx.Module):
    """`x += post(mixer(pre(x)))`, then `x += post(ffn(pre(x)))`; the spec says which of the norms there are."""

    def __init__(self, spec: BlockSpec, *, d_model: int, n_layers: int, rngs: nnx.Rngs):
        self.mixer = spec.mixer.build(d_model=d_model, n_layers=n_layers, rngs=rngs)
        self.ffn = spec.ffn.build(d_model=d_model, n_layers=n_layers, rngs=rngs)
        self.pre, self.post = spec.norms != "post", spec.norms != "pre"
        if self.pre:
            self.mixer_norm, self.ffn_norm = spec.norm.build(d_model), spec.norm.build(d_model)
        if self.post:
            self.mixer_post_norm, self.ffn_post_norm = spec.norm.build(d_model), spec.norm.build(d_model)

    def __call__(self, stream: jax.Array, ctx: Context, cache: LayerCache | None) -> tuple[jax.Array, LayerCache | None, Aux]:
        """Stream [B, T, D] -> stream, the mixer's cache, auxiliary terms."""
        stream = constrain(stream, "batch", "seq", "embed")
        mixed, cache, mixer_aux = self.mixer(self.mixer_norm(stream) if self.pre else stream, ctx, cache)
        stream = constrain(stream + (self.mixer_post_norm(mixed) if self.post else mixed), "batch", "seq", "embed")
        acted, ffn_aux = self.ffn(self.ffn_norm(stream) if self.pre else stream, ctx)
        return stream + (self.ffn_post_norm(acted) if self.post else acted), cache, add_aux(mixer_aux, ffn_aux)


class Stack(nnx.Module):
    """A pattern of blocks whose weights carry a leading layer axis, run under one scan."""

    def __init__(self, spec: StackSpec, *, d_model: int, n_layers: int, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=spec.repeats)
        @nnx.vmap(in_axes=0, out_axes=0)
        def create(layer_rngs: nnx.Rngs) -> nnx.List:
            return nnx.List([Block(block, d_model=d_model, n_layers=n_layers, rngs=layer_rngs) for block in spec.pattern])

        self.blocks = create(rngs)
        self.repeats = spec.repeats

    def __call__(self, stream: jax.Array, ctx: Context, cache: list | None, *, numerics: Numerics) -> tuple[jax.Array, list | None, Aux]:
        """Stream [B, T, D] through all layers; `cache` is a list over the pattern, each entry with a leading layer axis."""
        graph, weights = nnx.split(self.blocks)

        # The cache is carried, not scanned over: each step would build its stacked arrays anew, and copy all that it keeps.
        def layer(carry: tuple[jax.Array, list | None], inputs: tuple) -> tuple[tuple[jax.Array, list | None], Aux]:
            (stream, cache), (number, layer_weights) = carry, inputs
            stream = checkpoint_name(stream, BLOCK_INPUT)
            aux: Aux = {}
            written = []
            for index, block in enumerate(nnx.merge(graph, layer_weights)):
                kept = None if cache is None else LayerCache(cache[index], number)
                key = None if ctx.key is None else jax.random.fold_in(ctx.key, number * len(self.blocks) + index)
                stream, kept, block_aux = block(stream, replace(ctx, key=key), kept)
                written.append(None if kept is None else kept.stacked)
                aux = add_aux(aux, _placed(block_aux, f"blocks.{index}.ffn"))
            return (stream, None if cache is None else written), aux

        if numerics.remat != "none":
            layer = jax.checkpoint(layer, policy=REMAT_POLICIES[numerics.remat], prevent_cse=False)
        (stream, cache), aux = jax.lax.scan(layer, (stream, cache), (jnp.arange(self.repeats), weights))
        summed = {name: term if isinstance(term, Load) else jax.tree.map(lambda x: jnp.sum(x, 0), term) for name, term in aux.items()}
        return stream, cache, summed


class Decoder(nnx.Module):
    """A causal language model, built from a `ModelSpec`."""

    def __init__(self, spec: ModelSpec, *, rngs: nnx.Rngs, numerics: Numerics | None = None):
        self.spec = spec
        self.numerics = numerics or Numerics()
        V, D, L = spec.vocab_rows, spec.d_model, len(spec.blocks)
        self.embedding = table(rngs, (V, D), axes=("vocab", "embed"), stddev=0.02)
        self.stacks = nnx.List([Stack(stack, d_model=D, n_layers=L, rngs=rngs) for stack in spec.stacks])
        if spec.learned_positions is not None:
            self.positions = table(rngs, (spec.learned_positions, D), axes=("positions", "embed"), stddev=0.02)
        self.norm = spec.norm.build(D)
        if not spec.tie_embeddings:
            self.head = table(rngs, (D, V), axes=("embed", "vocab"), stddev=0.02)
        if spec.mtp:
            blocks = [Block(block, d_model=D, n_layers=L, rngs=rngs) for block in spec.mtp]
            self.mtp = nnx.List([Predictor(block, norm=spec.norm, d_model=D, rngs=rngs) for block in blocks])

    def __call__(
        self,
        tokens: jax.Array,
        *,
        positions: jax.Array,
        segments: jax.Array,
        cache: Cache | None = None,
        counted: jax.Array | None = None,
        key: jax.Array | None = None,
    ) -> Output:
        """Run the model.

        Args:
            tokens: ids [B, T].
            positions: position of each token within its document [B, T].
            segments: document of each token within its row [B, T], 0 for padding. With a cache: 1 for real tokens.
            cache: from `init_cache` or an earlier call; this call's tokens follow those in it.
            counted: tokens [B, T] that loads and losses of routers are over, if real; none: all real ones.
            key: for what is random in training; none: nothing is.

        Returns:
            Hidden states of this call's tokens, and the cache extended by them.
        """
        key_positions, key_segments, index = positions, segments, None
        if cache is not None:
            index = cache.length
            key_positions = jax.lax.dynamic_update_slice_in_dim(cache.positions, positions, index, axis=1)
            key_segments = jax.lax.dynamic_update_slice_in_dim(cache.segments, segments, index, axis=1)
        ctx = Context(tokens, positions, segments, key_positions, key_segments, index, counted=counted, **self._how)
        ctx = ctx.prepared(block.mixer for stack in self.spec.stacks for block in stack.pattern)
        stream = self.embed(tokens, positions)
        aux: Aux = {}
        layers = []
        for number, stack in enumerate(self.stacks):
            ctx = replace(ctx, key=None if key is None else jax.random.fold_in(key, number))
            stream, written, stack_aux = stack(stream, ctx, None if cache is None else cache.layers[number], numerics=self.numerics)
            layers.append(written)
            aux = add_aux(aux, {f"stacks.{number}.{name}" if isinstance(term, Load) else name: term for name, term in stack_aux.items()})
        if cache is not None:
            cache = Cache(layers, key_positions, key_segments, cache.length + tokens.shape[1])
        return Output(self.norm(constrain(stream, "batch", "seq", "embed")), cache, *_apart(aux))

    def further(
        self,
        hidden: jax.Array,
        tokens: jax.Array,
        *,
        positions: jax.Array,
        segments: jax.Array,
        counted: tuple[jax.Array | None, ...] | None = None,
        key: jax.Array | None = None,
    ) -> Further:
        """Predict tokens beyond the next, for training: each depth goes on from the hidden states of the one before.

        A place that a depth does not reach, since its document or row ends before, is padding there: nothing sees it, and no router counts it.

        Args:
            hidden: of `Output` for these tokens [B, T, D].
            tokens, positions, segments: as that call had them [B, T].
            counted: for each depth what `__call__` has for all layers; none: all real ones.
            key: as that call's.
        """
        states, aux = [], {}
        for index, (predictor, block) in enumerate(zip(self.mtp if self.spec.mtp else (), self.spec.mtp, strict=True)):
            depth = index + 1
            reached = jnp.where(follows(segments, depth), segments, 0)
            ctx = Context(later(tokens, depth), positions, reached, positions, reached, **self._how)
            ctx = replace(
                ctx.prepared([block.mixer]),
                counted=None if counted is None else counted[index],
                key=None if key is None else jax.random.fold_in(key, len(self.spec.blocks) + index),
            )
            embedded = self.embed(ctx.tokens, later(positions, depth))
            hidden, found = self._predict(predictor, hidden, embedded, ctx)
            states.append(hidden)
            aux = add_aux(aux, _placed(found, f"mtp.{index}.block.ffn"))
        return Further(tuple(states), *_apart(aux))

    def _predict(self, predictor: Predictor, hidden: jax.Array, embedded: jax.Array, ctx: Context) -> tuple[jax.Array, Aux]:
        """A depth, with what the backward pass is to make again."""
        graph, weights = nnx.split(predictor)

        def run(weights: nnx.State, hidden: jax.Array, embedded: jax.Array) -> tuple[jax.Array, Aux]:
            return nnx.merge(graph, weights)(hidden, embedded, ctx)

        if self.numerics.remat != "none":
            run = jax.checkpoint(run, policy=REMAT_POLICIES[self.numerics.remat])
        return run(weights, hidden, embedded)

    @property
    def _how(self) -> dict[str, Any]:
        """What a context says of how layers are run."""
        return {"attention": self.numerics.attention, "experts": self.numerics.experts}

    def embed(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """Ids and positions [B, T] -> the stream before the first block [B, T, D]."""
        spec, dtype = self.spec, self.numerics.dtype
        stream = look_up(self.embedding[...], tokens, dtype)
        if spec.embedding_scale != 1.0:
            stream = stream * jnp.asarray(spec.embedding_scale, dtype)
        if spec.learned_positions is not None:
            stream = stream + look_up(self.positions[...], positions, dtype)
        return stream

    def output_head(self) -> jax.Array:
        """The matrix from hidden states to logits, float32: [D, V], and columns for spare rows where the spec has such."""
        return self.embedding[...].T if self.spec.tie_embeddings else self.head[...]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Hidden states [B, T, D] -> logits [B, T, V], float32."""
        logits = jnp.einsum("btd,dv->btv", hidden, self.output_head().astype(hidden.dtype), preferred_element_type=jnp.float32)
        return capped(logits[..., : self.spec.vocab_size], self.spec.final_softcap)

    def init_cache(self, *, batch: int, length: int) -> Cache:
        """An empty cache for `length` tokens a row, in the type of activations."""

        def zeros(stack: StackSpec, block: BlockSpec) -> dict[str, jax.Array]:
            shapes = block.mixer.cache_shapes(batch=batch, length=length)
            return {name: jnp.zeros((stack.repeats, *shape), self.numerics.dtype) for name, shape in shapes.items()}

        layers = [[zeros(stack, block) for block in stack.pattern] for stack in self.spec.stacks]
        empty = jnp.zeros((batch, length), jnp.int32)
        return Cache(layers, positions=empty, segments=empty, length=jnp.zeros((), jnp.int32))


def add_aux[T: tuple[jax.Array, jax.Array] | Load](left: dict[str, T], right: dict[str, T]) -> dict[str, T]:
    """Sums and denominators added name by name."""
    return left | {name: term if name not in left else jax.tree.map(jnp.add, left[name], term) for name, term in right.items()}


def _apart(aux: Aux) -> tuple[dict[str, tuple[jax.Array, jax.Array]], dict[str, Load]]:
    """Terms, and loads."""
    terms = {name: term for name, term in aux.items() if not isinstance(term, Load)}
    return terms, {path: term for path, term in aux.items() if isinstance(term, Load)}


def _placed(aux: Aux, path: str) -> Aux:
    """With the load under the path of the mixture that it is of."""
    return {path if isinstance(term, Load) else name: term for name, term in aux.items()}
