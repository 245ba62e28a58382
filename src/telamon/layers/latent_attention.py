"""Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1): the keys and values of all heads come from one latent.

Letters of its own: C the latent's width; P and R a head's features without and with a rotation, H = P + R; U a value's features.

A head's scores have two parts, `q_P . k_P` and `q_R . k_R`, and all heads share one rotated key k_R. Without a cache, keys and
values are made for every head: for training that is the fewest operations. A cache holds the latent and k_R alone, C + R values
a token whatever the number of heads. Since `k_P = c W_K`, `q_P . k_P = (q_P W_K^T) . c`, so that a query reads the latents as
they are, all heads the same ones; and what it reads goes through `W_V` once, instead of every latent.
"""

from typing import Annotated

import jax
import jax.numpy as jnp
from flax import nnx
from pydantic import Field

from telamon.config.schema import Positive
from telamon.kernels.attention import Places, Scores, attention
from telamon.layers.linear import dense, from_heads, heads_to_inputs, inputs_to_heads, to_heads
from telamon.layers.norm import NormConfig
from telamon.layers.param import matrix, vector
from telamon.layers.parts import Aux, Context, LayerCache, MixerConfig, register
from telamon.layers.rope import RopeConfig, Rotation, YarnScaling, rotate, rotation, yarn_growth
from telamon.parallel.rules import constrain


@register
class LatentAttentionConfig(MixerConfig):
    """N heads whose keys and values come from one latent, and whose queries may come from another."""

    kind: str = "latent_attention"
    n_heads: Positive = Field(description="Heads N.")
    q_rank: Positive | None = Field(default=None, description="Width of the latent of queries; none: they come from the stream itself.")
    kv_rank: Positive = Field(description="Width C of the latent of keys and values.")
    nope_dim: Positive = Field(description="Features P of a query or a key that are not rotated.")
    rope_dim: Annotated[int, Field(gt=0, multiple_of=2)] = Field(description="Features R of a query or a key that are rotated.")
    value_dim: Positive = Field(description="Features U of a value.")
    rope: RopeConfig = Field(default=RopeConfig(pairs="interleaved"), description="Rotary positions of the R features.")
    scale: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="Factor on the scores; none: (nope_dim + rope_dim) ** -0.5, times m(factor, mscale_all_dim) ** 2 where YaRN says the latter.",
    )
    norm: NormConfig = Field(default=NormConfig(eps=1e-6), description="Norm of the latents.")
    bias: bool = Field(default=False, description="Biases on the maps from and to the stream, but for queries without a latent.")

    @property
    def head_dim(self) -> int:
        """Features H of a query or a key."""
        return self.nope_dim + self.rope_dim

    @property
    def softmax_scale(self) -> float:
        """Factor on the scores.

        YaRN sharpens attention by m on queries and on keys. Cosines and sines would reach their rotated features only, so
        that DeepSeek's models have m^2 here (their published code; PR 47435 of transformers for V2).
        """
        if self.scale is not None:
            return self.scale
        plain, scaling = self.head_dim**-0.5, self.rope.scaling
        if isinstance(scaling, YarnScaling) and scaling.mscale_all_dim:
            return plain * yarn_growth(scaling.factor, scaling.mscale_all_dim) ** 2
        return plain

    @property
    def attention_sizes(self) -> tuple[int, int, int]:
        """N, H and U."""
        return self.n_heads, self.head_dim, self.value_dim

    def cache_shapes(self, *, batch: int, length: int) -> dict[str, tuple[int, ...]]:
        """Latents, normed, and behind each the rotated key that all heads share: [B, S, C + R], read as they lie."""
        return {"latent": (batch, length, self.kv_rank + self.rope_dim)}

    def prepare(self, ctx: Context) -> dict[str, Rotation]:
        """The rotation of every position."""
        frequencies = self.rope.inverse_frequencies(self.rope_dim)
        return {self.rotation_name: rotation(ctx.positions, frequencies, amplitude=self.rope.amplitude)}

    @property
    def rotation_name(self) -> str:
        """What a rotation depends on."""
        return f"rotation of {self.rope_dim} by {self.rope!r}"

    def build(self, *, d_model: int, n_layers: int, rngs: nnx.Rngs) -> "LatentAttention":
        """See `MixerConfig`."""
        return LatentAttention(self, d_model=d_model, n_layers=n_layers, rngs=rngs)


class LatentAttention(nnx.Module):
    """Weights: query [D, N, H], or query_down [D, rank] and query_up [rank, N, H]; kv_down [D, C + R], kv_up [C, N, P + U]; out [N, U, D]."""

    def __init__(self, config: LatentAttentionConfig, *, d_model: int, n_layers: int, rngs: nnx.Rngs):
        self.config = config
        N, C, rank = config.n_heads, config.kv_rank, config.q_rank
        if rank is None:
            self.query = matrix(rngs, (d_model, N, config.head_dim), axes=("embed", "heads", "head_dim"), inputs=1)
        else:
            self.query_down = matrix(rngs, (d_model, rank), axes=("embed", "rank"), inputs=1)
            self.query_norm = config.norm.build(rank)
            self.query_up = matrix(rngs, (rank, N, config.head_dim), axes=("latent", "heads", "head_dim"), inputs=1)
        self.kv_down = matrix(rngs, (d_model, C + config.rope_dim), axes=("embed", "rank"), inputs=1)
        self.kv_norm = config.norm.build(C)
        self.kv_up = matrix(rngs, (C, N, config.nope_dim + config.value_dim), axes=("latent", "heads", "head_dim"), inputs=1)
        out_shape = (N, config.value_dim, d_model)
        self.out = matrix(rngs, out_shape, axes=("heads", "head_dim", "embed"), inputs=2, scale=(2 * n_layers) ** -0.5)
        if config.bias:
            if rank is not None:
                self.query_down_bias = vector((rank,), axes=("norm",), fill=0.0)
            self.kv_down_bias = vector((C + config.rope_dim,), axes=("norm",), fill=0.0)
            self.out_bias = vector((d_model,), axes=("norm",), fill=0.0)

    def __call__(self, x_BTD: jax.Array, ctx: Context, cache: LayerCache | None) -> tuple[jax.Array, LayerCache | None, Aux]:
        """[B, T, D] -> [B, T, D]; a cache is written at `ctx.write_index` and read whole."""
        by = ctx.shared_by(self.config, self.config.rotation_name)
        plain_BTNP, turned_BTNR = self._queries(x_BTD, by)
        latent_BTC, key_BT1R = self._latents(x_BTD, by)
        if cache is None:
            mixed_BTNU = self._over_heads(plain_BTNP, turned_BTNR, latent_BTC, key_BT1R, ctx)
        else:
            assert ctx.write_index is not None, "a cache needs the slot to write"
            new_BTJ = jnp.concatenate([latent_BTC, key_BT1R[:, :, 0]], axis=-1)
            cache = cache.write({"latent": new_BTJ}, dim=1, index=ctx.write_index)
            mixed_BTNU = self._over_latents(plain_BTNP, turned_BTNR, cache["latent"], ctx)
        return from_heads(mixed_BTNU, self.out[...], self.out_bias[...] if self.config.bias else None), cache, {}

    def _queries(self, x_BTD: jax.Array, by: Rotation) -> tuple[jax.Array, jax.Array]:
        """The features without and with a rotation, the latter rotated."""
        config = self.config
        if config.q_rank is None:
            q_BTNH = to_heads(x_BTD, self.query[...])
        else:
            down = dense(x_BTD, self.query_down[...], self.query_down_bias[...] if config.bias else None)
            q_BTNH = to_heads(self.query_norm(down), self.query_up[...])
        q_BTNH = constrain(q_BTNH, "batch", "seq", "heads", "head_dim")
        plain_BTNP, turned_BTNR = jnp.split(q_BTNH, [config.nope_dim], axis=-1)
        return plain_BTNP, rotate(turned_BTNR, by, config.rope.pairs)

    def _latents(self, x_BTD: jax.Array, by: Rotation) -> tuple[jax.Array, jax.Array]:
        """The normed latent of each token, and its rotated key."""
        down_BTJ = dense(x_BTD, self.kv_down[...], self.kv_down_bias[...] if self.config.bias else None)
        latent_BTC, key_BTR = jnp.split(down_BTJ, [self.config.kv_rank], axis=-1)
        return self.kv_norm(latent_BTC), rotate(key_BTR[:, :, None], by, self.config.rope.pairs)

    def _over_heads(self, plain_BTNP, turned_BTNR, latent_BTC, key_BT1R, ctx: Context) -> jax.Array:
        """What each head of each query gets [B, T, N, U], with keys and values made for every head."""
        up_BTNI = constrain(to_heads(latent_BTC, self.kv_up[...]), "batch", "seq", "heads", "head_dim")
        k_BTNP, v_BTNU = jnp.split(up_BTNI, [self.config.nope_dim], axis=-1)
        k_BTNH = jnp.concatenate([k_BTNP, jnp.broadcast_to(key_BT1R, turned_BTNR.shape)], axis=-1)
        return self._attend(jnp.concatenate([plain_BTNP, turned_BTNR], axis=-1), k_BTNH, v_BTNU, ctx, aligned=True)

    def _over_latents(self, plain_BTNP, turned_BTNR, kept_BSJ, ctx: Context) -> jax.Array:
        """The same with latents for keys and values, of which all heads share one."""
        key_up_CNP, value_up_CNU = jnp.split(self.kv_up[...], [self.config.nope_dim], axis=-1)
        q_BTNJ = jnp.concatenate([heads_to_inputs(plain_BTNP, key_up_CNP), turned_BTNR], axis=-1)
        # The rotated keys are read among the values too, and what that gives is left: a copy of the latents alone would cost more.
        kept_BS1J = kept_BSJ[:, :, None]
        read_BTNJ = self._attend(q_BTNJ, kept_BS1J, kept_BS1J, ctx, aligned=False)
        return inputs_to_heads(read_BTNJ[..., : self.config.kv_rank], value_up_CNU)

    def _attend(self, q: jax.Array, k: jax.Array, v: jax.Array, ctx: Context, *, aligned: bool) -> jax.Array:
        return attention(
            q,
            k,
            v,
            queries=Places(ctx.positions, ctx.segments),
            keys=Places(ctx.key_positions, ctx.key_segments),
            scores=Scores(self.config.softmax_scale),
            aligned=aligned,
            path=ctx.attention,
        )
