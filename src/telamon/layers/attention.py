"""Grouped-query attention (Ainslie et al. 2023), with what published models add: rotary positions, norms of queries and keys,
a window or chunks, sinks, capped scores, a temperature, biases."""

from collections.abc import Callable
from typing import Annotated, Literal, Self

import jax
import jax.numpy as jnp
from flax import nnx
from pydantic import Field, model_validator

from telamon.config.schema import Positive, Section
from telamon.kernels.attention import Places, Scores, attention
from telamon.kernels.matmul import narrow
from telamon.layers.linear import from_heads, to_heads
from telamon.layers.norm import NormConfig
from telamon.layers.param import matrix, vector
from telamon.layers.parts import Aux, Context, LayerCache, MixerConfig, register
from telamon.layers.rope import RopeConfig, Rotation, rotate, rotation
from telamon.parallel.rules import constrain


class TemperatureConfig(Section):
    """Queries are scaled up with their position: by `1 + scale ln(1 + floor((position + 1) / floor))` (Llama 4, for layers without rotation)."""

    scale: Annotated[float, Field(gt=0)] = Field(default=0.1, description="How much sharper attention becomes.")
    floor: Positive = Field(default=8192, description="Positions of one step of the temperature, in tokens.")

    def factors(self, positions: jax.Array) -> jax.Array:
        """Of queries at these positions [B, T]: [B, T] float32."""
        steps = (positions + 1) // self.floor
        return 1.0 + self.scale * jnp.log1p(steps.astype(jnp.float32))


@register
class AttentionConfig(MixerConfig):
    """N query heads share K key-value heads in groups of N / K."""

    kind: str = "attention"
    n_heads: Positive = Field(description="Query heads N.")
    n_kv_heads: Positive = Field(description="Key-value heads K; a divisor of n_heads.")
    head_dim: Annotated[int, Field(gt=0, multiple_of=2)] = Field(description="Features of a head H.")
    rope: RopeConfig | None = Field(default=RopeConfig(), description="Rotary positions; none: queries and keys are not rotated.")
    window: Annotated[int, Field(gt=0)] | None = Field(
        default=None, description="Keys each query sees at most, itself included, in positions; none: all before it."
    )
    chunk: Annotated[int, Field(gt=0)] | None = Field(
        default=None,
        description="A document is cut into chunks of this many positions, and queries see their own chunk's keys; none: it is not.",
    )
    sinks: bool = Field(default=False, description="Each query head has a learned score that takes its share of the softmax, for no value.")
    scale: Annotated[float, Field(gt=0)] | None = Field(default=None, description="Factor on the scores; none: head_dim ** -0.5.")
    softcap: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="Scores go through softcap * tanh(score / softcap), before the mask (Gemma 2); none: as they are."
    )
    temperature: TemperatureConfig | None = Field(default=None, description="Queries grow with their position; none: they do not.")
    qk_norm: NormConfig | None = Field(default=None, description="Norm of queries and keys.")
    qk_norm_place: Literal["before", "after"] = Field(
        default="before", description="qk_norm stands before the rotation, or after it (Llama 4)."
    )
    qk_norm_over: Literal["head", "projection"] = Field(
        default="head", description="qk_norm is over each head with one scale for all (Qwen3), or over all heads together (OLMo 2)."
    )
    qkv_bias: bool = Field(default=False, description="Biases on queries, keys and values.")
    out_bias: bool = Field(default=False, description="Bias on the output map.")

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads={self.n_heads} is not divisible by n_kv_heads={self.n_kv_heads}")
        return self

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if self.window is not None and self.chunk is not None:
            raise ValueError(f"attention has a window or chunks, not both; got window={self.window} and chunk={self.chunk}")
        return self

    @property
    def attention_sizes(self) -> tuple[int, int, int]:
        """N, H and H."""
        return self.n_heads, self.head_dim, self.head_dim

    @property
    def attention_window(self) -> int | None:
        """See `window`."""
        return self.window

    @property
    def attention_chunk(self) -> int | None:
        """See `chunk`."""
        return self.chunk

    def cache_shapes(self, *, batch: int, length: int) -> dict[str, tuple[int, ...]]:
        """Keys, already rotated, and values: [B, K, S, H] each, the order in which attention reads them."""
        shape = (batch, self.n_kv_heads, length, self.head_dim)
        return {"k": shape, "v": shape}

    def prepare(self, ctx: Context) -> dict[str, Rotation | jax.Array]:
        """The rotation of every position, whose sines are dear, and the temperature: the same in all layers."""
        made: dict[str, Rotation | jax.Array] = {}
        if self.rope is not None:
            frequencies = self.rope.inverse_frequencies(self.head_dim)
            made[self.rotation_name] = rotation(ctx.positions, frequencies, amplitude=self.rope.amplitude)
        if self.temperature is not None:
            made[self.temperature_name] = self.temperature.factors(ctx.positions)
        return made

    @property
    def rotation_name(self) -> str:
        """What a rotation depends on."""
        return f"rotation of {self.head_dim} by {self.rope!r}"

    @property
    def temperature_name(self) -> str:
        """What a temperature depends on."""
        return f"temperature by {self.temperature!r}"

    def build(self, *, d_model: int, n_layers: int, rngs: nnx.Rngs) -> "Attention":
        """See `MixerConfig`."""
        return Attention(self, d_model=d_model, n_layers=n_layers, rngs=rngs)


class Attention(nnx.Module):
    """Weights: query [D, N, H], key and value [D, K, H], out [N, H, D]; sinks [N] where there are some."""

    def __init__(self, config: AttentionConfig, *, d_model: int, n_layers: int, rngs: nnx.Rngs):
        self.config = config
        N, K, H = config.n_heads, config.n_kv_heads, config.head_dim
        self.query = matrix(rngs, (d_model, N, H), axes=("embed", "heads", "head_dim"), inputs=1)
        self.key = matrix(rngs, (d_model, K, H), axes=("embed", "kv_heads", "head_dim"), inputs=1)
        self.value = matrix(rngs, (d_model, K, H), axes=("embed", "kv_heads", "head_dim"), inputs=1)
        self.out = matrix(rngs, (N, H, d_model), axes=("heads", "head_dim", "embed"), inputs=2, scale=(2 * n_layers) ** -0.5)
        if config.qkv_bias:
            self.query_bias = vector((N, H), axes=("heads", "head_dim"), fill=0.0)
            self.key_bias = vector((K, H), axes=("kv_heads", "head_dim"), fill=0.0)
            self.value_bias = vector((K, H), axes=("kv_heads", "head_dim"), fill=0.0)
        if config.out_bias:
            self.out_bias = vector((d_model,), axes=("norm",), fill=0.0)
        if config.sinks:
            self.sinks = vector((N,), axes=("heads",), fill=0.0)
        if config.qk_norm is not None:
            whole = config.qk_norm_over == "projection"
            self.query_norm = config.qk_norm.build(N * H if whole else H)
            self.key_norm = config.qk_norm.build(K * H if whole else H)

    def __call__(self, x_BTD: jax.Array, ctx: Context, cache: LayerCache | None) -> tuple[jax.Array, LayerCache | None, Aux]:
        """[B, T, D] -> [B, T, D]; a cache is written at `ctx.write_index` and read whole."""
        config = self.config
        q_BTNH, k_BTKH, v_BTKH = self._project(x_BTD)
        q_BTNH, k_BTKH = self._placed(q_BTNH, k_BTKH, ctx)
        k, v = k_BTKH, v_BTKH
        if cache is not None:
            assert ctx.write_index is not None, "a cache needs the slot to write"
            new = {"k": jnp.swapaxes(k_BTKH, 1, 2), "v": jnp.swapaxes(v_BTKH, 1, 2)}
            cache = cache.write(new, dim=2, index=ctx.write_index)
            k, v = jnp.swapaxes(cache["k"], 1, 2), jnp.swapaxes(cache["v"], 1, 2)
        mixed_BTNH = attention(
            constrain(q_BTNH, "batch", "seq", "heads", "head_dim"),
            k,
            v,
            queries=Places(ctx.positions, ctx.segments),
            keys=Places(ctx.key_positions, ctx.key_segments),
            scores=Scores(config.scale or config.head_dim**-0.5, softcap=config.softcap, window=config.window, chunk=config.chunk),
            aligned=cache is None,
            sinks=self.sinks[...] if config.sinks else None,
            path=ctx.attention,
        )
        return from_heads(mixed_BTNH, self.out[...], self.out_bias[...] if config.out_bias else None), cache, {}

    def _project(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        bias = self.config.qkv_bias
        q_BTNH = to_heads(x_BTD, self.query[...], self.query_bias[...] if bias else None)
        k_BTKH = to_heads(x_BTD, self.key[...], self.key_bias[...] if bias else None)
        v_BTKH = to_heads(x_BTD, self.value[...], self.value_bias[...] if bias else None)
        return q_BTNH, k_BTKH, v_BTKH

    def _placed(self, q_BTNH: jax.Array, k_BTKH: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """Queries and keys as they are compared: normed, rotated, and queries times their temperature."""
        config = self.config
        if config.qk_norm is not None and config.qk_norm_place == "before":
            q_BTNH, k_BTKH = self._normed(self.query_norm, q_BTNH), self._normed(self.key_norm, k_BTKH)
        if config.rope is not None:
            by = ctx.shared_by(config, config.rotation_name)
            q_BTNH, k_BTKH = rotate(q_BTNH, by, config.rope.pairs), rotate(k_BTKH, by, config.rope.pairs)
        if config.qk_norm is not None and config.qk_norm_place == "after":
            q_BTNH, k_BTKH = self._normed(self.query_norm, q_BTNH), self._normed(self.key_norm, k_BTKH)
        if config.temperature is not None:
            factors_BT11 = ctx.shared_by(config, config.temperature_name)[:, :, None, None]
            q_BTNH = (narrow(q_BTNH).astype(jnp.float32) * factors_BT11).astype(q_BTNH.dtype)
        return q_BTNH, k_BTKH

    def _normed(self, norm: Callable[[jax.Array], jax.Array], x_BTNH: jax.Array) -> jax.Array:
        if self.config.qk_norm_over == "head":
            return norm(x_BTNH)
        return norm(x_BTNH.reshape(*x_BTNH.shape[:2], -1)).reshape(x_BTNH.shape)
