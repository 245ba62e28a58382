"""Batched generation, on token ids: a prefill of the prompts, then chunks of steps in one compiled loop.

Prompts of unequal length share a batch. Which places are padding is said by one mask, never read off the token
values; padding may stand on either side or anywhere. The forward is the trainer's own, with a cache.
"""

import contextlib
import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from telamon.errors import ConfigError
from telamon.infer.sampling import RowSampling, Sampling, row_keys, sample
from telamon.kernels.picks import noted
from telamon.models.decoder import Cache
from telamon.models.weights import Model, Weights
from telamon.parallel.rules import ACTIVATION_RULES, constrain

Finish = Literal["eos", "stop", "length"]

_CHUNK = 16
"""Steps between two looks of the host: text streams this often, and at most this many steps are wasted on a stop string."""

_PROMPT_STEP, _CACHE_STEP = 32, 64
"""Prompts and caches are rounded up to these, so that other lengths seldom compile anew."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _State:
    cache: Cache
    logits: jax.Array
    """Of the next token [B, V], float32."""
    position: jax.Array
    """Of the next token within its document [B]."""
    done: jax.Array
    """Rows that have ended [B]."""
    step: jax.Array
    """Tokens drawn so far, scalar."""


class Generator:
    """A model ready to generate; compiled programs are kept and serve later batches of similar size.

    Args:
        model: what the weights belong to; its numerics say in which type it runs.
        weights: as `Model.init` gives them, on the devices of `mesh`. Matrices are kept here in the type the model runs in,
            so that no step reads or rounds the float32 ones.
        eos_ids: tokens that end a text: a document's end, a turn's end; empty: nothing does.
        vocab_size: ids the tokenizer knows; what the embedding table holds beyond them is never drawn.
        mesh: none: the default device.
    """

    def __init__(self, model: Model, weights: Weights, *, eos_ids: Iterable[int], vocab_size: int | None = None, mesh: Mesh | None = None):
        self.weights = _matrices_as(model, weights)
        self._mesh = mesh
        self._known = model.spec.vocab_size
        self._eos = tuple(sorted(set(eos_ids)))
        self._prefill = jax.jit(functools.partial(_prefill, model), static_argnames="length")
        self._decode = _decode_program(model, eos_ids=self._eos, vocab_size=vocab_size or model.spec.vocab_size)

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        sampling: Sampling | Sequence[Sampling],
        seed: int = 0,
    ) -> "Session":
        """Begin to continue prompts.

        Args:
            prompts: ids of each, at least one, BOS included where the model expects it.
            max_tokens: most tokens a row gets.
            sampling: for all rows, or one a row.
            seed: the same seed and prompt give the same tokens, whatever else is in the batch.

        Raises:
            ConfigError: a prompt has an id that the model has no row for.
        """
        assert prompts and all(prompts) and max_tokens > 0
        check_known(max(map(max, prompts)), rows=self._known)
        tokens, mask = pad(prompts, rows=self._rows(len(prompts)), width=_up(max(map(len, prompts)), _PROMPT_STEP))
        each = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
        spare = len(tokens) - len(prompts)
        keys = row_keys([*prompts, *([()] * spare)], seed)
        return Session(
            self, tokens, mask, keys=keys, sampling=[*each, *[Sampling(temperature=0)] * spare], rows=len(prompts), max_tokens=max_tokens
        )

    def prefill(self, tokens: np.ndarray, mask: np.ndarray, *, length: int) -> _State:
        """Run prompts [B, P]; `mask` is 1 at real tokens; `length` places are kept for the cache."""
        with self._entered():
            return self._prefill(self.weights, tokens, mask, length=length)

    def decode(self, state: _State, *, stopped: np.ndarray, keys: np.ndarray, rows: RowSampling, limit: int) -> tuple[np.ndarray, _State]:
        """At most `limit` steps; rows in `stopped` are over, `keys` are raw. Gives ids [B, steps], -1 where a row had ended."""
        with self._entered():
            ids, state = self._decode(self.weights, state=state, stopped=stopped, keys=keys, rows=rows, limit=limit)
            return np.asarray(ids), state

    def _rows(self, prompts: int) -> int:
        # With one row a product is one of a matrix and a vector, for which XLA on CPU has no fast path in bfloat16.
        prompts = max(prompts, 2)
        if self._mesh is None:
            return prompts
        return _up(prompts, math.prod(self._mesh.shape[axis] for axis in ACTIVATION_RULES["batch"]))

    def _entered(self) -> Any:
        return contextlib.nullcontext() if self._mesh is None else jax.set_mesh(self._mesh)


class Session:
    """A batch on its way. Call :meth:`advance` until :attr:`running` is false.

    Attributes:
        tokens: ids drawn so far for each row, without the EOS that ended it.
        finish: why each row ended; none while it goes on.
    """

    def __init__(
        self,
        generator: Generator,
        tokens: np.ndarray,
        mask: np.ndarray,
        *,
        keys: jax.Array,
        sampling: Sequence[Sampling],
        rows: int,
        max_tokens: int,
    ):
        # As plain words: every process of a run holds the same ones, and none has to place them.
        self._keys = np.asarray(jax.random.key_data(keys))
        self._generator, self._sampling = generator, RowSampling.stack(sampling)
        self._left = max_tokens
        self._stopped = np.arange(len(tokens)) >= rows
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self.finish: list[Finish | None] = [None] * rows
        self._state = generator.prefill(tokens, mask, length=_up(tokens.shape[1] + max_tokens, _CACHE_STEP))

    @property
    def running(self) -> bool:
        """Whether any row goes on."""
        return None in self.finish

    def stop(self, row: int, *, keep: int) -> None:
        """End a row at a stop string, with the first `keep` of its tokens."""
        self._stopped[row] = True
        self.finish[row] = "stop"
        del self.tokens[row][keep:]

    def advance(self) -> None:
        """Draw up to a chunk of tokens for every row that goes on."""
        assert self.running
        limit = min(_CHUNK, self._left)
        ids, self._state = self._generator.decode(self._state, stopped=self._stopped, keys=self._keys, rows=self._sampling, limit=limit)
        self._left -= limit
        for row, new in enumerate(ids[: len(self.tokens)]):
            if self.finish[row] is not None:
                continue
            drawn = new[new >= 0].tolist()
            if drawn and drawn[-1] in self._generator._eos:
                drawn.pop()
                self.finish[row] = "eos"
            elif self._left == 0:
                self.finish[row] = "length"
            self.tokens[row] += drawn


def lower_decode(model: Model, mesh: Mesh, *, rows: int, length: int) -> jax.stages.Lowered:
    """The decode program of a model on a mesh, traced without weights, as it runs after a prefill; needs the mesh in force.

    Args:
        model: its numerics say in which type it runs.
        mesh: the weights are laid out on it as in training.
        rows: texts at a time.
        length: tokens of a text for which the cache has room.
    """
    dtype = model.numerics.dtype
    weights = jax.tree.map(
        lambda info, x: x if not info.narrowed else jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding),
        model.info,
        model.abstract(mesh),
    )
    length = _up(length, _CACHE_STEP)
    prompts = jax.ShapeDtypeStruct((rows, min(_PROMPT_STEP, length)), jnp.int32)
    with noted():  # which paths the prefill takes says nothing of this program
        state = jax.eval_shape(functools.partial(_prefill, model, length=length), weights, prompts, prompts)
    keys = jax.eval_shape(lambda: jax.random.key_data(jax.random.split(jax.random.key(0), rows)))
    program = _decode_program(model, eos_ids=(), vocab_size=model.spec.vocab_size)
    sampling = RowSampling.stack([Sampling()] * rows)
    return program.lower(weights, state=state, stopped=np.zeros(rows, bool), keys=keys, rows=sampling, limit=_CHUNK)


def check_known(largest: int, *, rows: int) -> None:
    """Raise ConfigError where the largest id of a text has no row in the model's table; a look-up would take the last row for it."""
    if largest >= rows:
        raise ConfigError(
            f"the text has the token {largest}, and the model has {rows:,} rows in its table (model.vocab_size): the tokenizer knows more "
            "tokens than the model; remove those that were added to its tokenizer.json, or leave them out of the text"
        )


def pad(
    prompts: Sequence[Sequence[int]], *, rows: int, width: int, side: Literal["left", "right"] = "right"
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and mask [rows, width], int32: prompts at one side, padding (mask 0) at the other; spare rows are padding."""
    tokens, mask = np.zeros((2, rows, width), np.int32)
    for row, prompt in enumerate(prompts):
        place = slice(0, len(prompt)) if side == "right" else slice(width - len(prompt), width)
        tokens[row, place] = prompt
        mask[row, place] = 1
    return tokens, mask


def _matrices_as(model: Model, weights: Weights) -> Weights:
    """Weights with those of linear maps and tables in the type of activations, as the layers would make them at every use.

    Scales, biases and routers stay as they are: they weigh nothing, and a layer may want them in float32.
    """
    return jax.tree.map(lambda info, x: x.astype(model.numerics.dtype) if info.narrowed else x, model.info, weights)


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def _prefill(model: Model, weights: Weights, tokens: jax.Array, mask: jax.Array, *, length: int) -> _State:
    decoder = model.bind(weights)
    B, P = tokens.shape
    counts = jnp.cumsum(mask, axis=1)
    cache = decoder.init_cache(batch=B, length=length)
    output = decoder(tokens, positions=jnp.maximum(counts - 1, 0), segments=mask, cache=cache)
    last = jnp.max(jnp.where(mask > 0, jnp.arange(P), 0), axis=1)
    hidden = jnp.take_along_axis(output.hidden, last[:, None, None], axis=1)
    assert output.cache is not None
    return _State(
        cache=output.cache,
        logits=decoder.logits(hidden)[:, 0],
        position=counts[:, -1],
        done=jnp.zeros((B,), bool),
        step=jnp.zeros((), jnp.int32),
    )


def _decode_program(model: Model, *, eos_ids: tuple[int, ...], vocab_size: int) -> Any:
    return jax.jit(functools.partial(_decode, model, eos_ids=eos_ids, vocab_size=vocab_size), donate_argnames="state")


def _decode(
    model: Model,
    weights: Weights,
    *,
    state: _State,
    stopped: jax.Array,
    keys: jax.Array,
    rows: RowSampling,
    limit: jax.Array,
    eos_ids: tuple[int, ...],
    vocab_size: int,
) -> tuple[jax.Array, _State]:
    decoder = model.bind(weights)
    known_V = jnp.arange(model.spec.vocab_size) < vocab_size
    ends = jnp.array(eos_ids, jnp.int32)

    def goes_on(carry: tuple[jax.Array, jax.Array, _State]) -> jax.Array:
        index, _, state = carry
        return (index < limit) & ~jnp.all(state.done)

    def one(carry: tuple[jax.Array, jax.Array, _State]) -> tuple[jax.Array, jax.Array, _State]:
        index, ids, state = carry
        # A key belongs to a row and a count of tokens, so that chunks leave no trace in what is drawn.
        step_keys = jax.vmap(jax.random.fold_in, (0, None))(jax.random.wrap_key_data(keys), state.step)
        drawn = sample(jnp.where(known_V, state.logits, -jnp.inf), step_keys, rows)
        live = ~state.done
        ids = jax.lax.dynamic_update_slice_in_dim(ids, jnp.where(live, drawn, -1)[:, None], index, axis=1)
        segments = live.astype(jnp.int32)[:, None]
        output = decoder(drawn[:, None], positions=state.position[:, None], segments=segments, cache=state.cache)
        assert output.cache is not None
        after = _State(
            cache=output.cache,
            logits=decoder.logits(output.hidden)[:, 0],
            position=state.position + 1,
            done=state.done | jnp.isin(drawn, ends),
            step=state.step + 1,
        )
        return index + 1, ids, after

    empty = jnp.full((stopped.shape[0], _CHUNK), -1, jnp.int32)
    begin = (jnp.zeros((), jnp.int32), empty, replace(state, done=state.done | stopped))
    _, ids, state = jax.lax.while_loop(goes_on, one, begin)
    return constrain(ids, None, None), state
