"""The experts of a mixture, computed in one of three ways, which agree where nothing is dropped:

- without dropping (the default): tokens are sorted by expert, and each expert multiplies the rows that are its own;
- capacity: each expert has as many places in a row of the batch as an even load would take, times a factor, and what comes after they
  are taken is dropped (first all tokens' best choices in the order of the row, then their second, ...);
- dense: every expert computes every token, for tests.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from telamon.kernels.experts import grouped_matmul
from telamon.kernels.matmul import matmul
from telamon.layers.dispatch import By, by_expert, collect, dispatch
from telamon.layers.mlp import gated
from telamon.layers.param import matrix, vector
from telamon.layers.router import Routing
from telamon.layers.sharded_experts import AXES, ExpertWeights, Kind, on_devices, shared
from telamon.parallel.rules import constrain


class Experts(nnx.Module):
    """Weights: gate and up [E, D, F], down [E, F, D], and where there are biases [E, F] and [E, D].

    Args:
        count: experts E.
        chosen: of which a token goes to X.
        d_model, d_ff: widths D and F.
        activation, limit: of `gated`.
        bias: the three maps have biases.
        weigh_input: a choice's weight multiplies what an expert is given, and not what it gives.
        scale: of the initial values of `down`.
        rngs: where initial values come from.
    """

    def __init__(
        self,
        *,
        count: int,
        chosen: int,
        d_model: int,
        d_ff: int,
        activation: str,
        limit: float | None,
        bias: bool,
        weigh_input: bool,
        scale: float,
        rngs: nnx.Rngs,
    ):
        self.count, self.chosen, self.weigh_input = count, chosen, weigh_input
        self.activation, self.limit, self.has_bias = activation, limit, bias
        used = chosen / count
        self.gate = matrix(rngs, (count, d_model, d_ff), axes=AXES["gate"], inputs=1, copies=True, used=used)
        self.up = matrix(rngs, (count, d_model, d_ff), axes=AXES["up"], inputs=1, copies=True, used=used)
        self.down = matrix(rngs, (count, d_ff, d_model), axes=AXES["down"], inputs=1, copies=True, used=used, scale=scale)
        if bias:
            self.gate_bias = vector((count, d_ff), axes=AXES["gate_bias"], fill=0.0, used=used)
            self.up_bias = vector((count, d_ff), axes=AXES["up_bias"], fill=0.0, used=used)
            self.down_bias = vector((count, d_model), axes=AXES["down_bias"], fill=0.0, used=used)

    @property
    def weights(self) -> ExpertWeights:
        """The arrays."""
        biases = (self.gate_bias[...], self.up_bias[...], self.down_bias[...]) if self.has_bias else ()
        return ExpertWeights(self.gate[...], self.up[...], self.down[...], *biases)

    def without_dropping(self, x_BTD: jax.Array, routing: Routing, *, path: str) -> jax.Array:
        """Rows sorted by expert and multiplied by `path` of the grouped matmul: [B, T, D] -> [B, T, D]."""
        weights, X = self.weights, self.chosen
        if shared(x_BTD.shape):
            kind = Kind(self.activation, self.limit, self.weigh_input, path)
            return on_devices(kind, x_BTD, routing.experts, routing.weights, weights)
        x_MD, weight_MX = x_BTD.reshape(-1, x_BTD.shape[-1]), routing.weights.reshape(-1, X)
        by = by_expert(routing.experts.reshape(-1, X), self.count)
        rows_RD = dispatch(x_MD, by)
        if self.weigh_input:
            rows_RD *= weight_MX.reshape(-1)[by.order, None].astype(rows_RD.dtype)
        gate_RF = _biased(grouped_matmul(rows_RD, weights.gate, by.sizes, path=path), weights.gate_bias, by)
        up_RF = _biased(grouped_matmul(rows_RD, weights.up, by.sizes, path=path), weights.up_bias, by)
        hidden_RF = gated(self.activation, self.limit, gate_RF, up_RF)
        made_RD = _biased(grouped_matmul(hidden_RF, weights.down, by.sizes, path=path), weights.down_bias, by)
        return self._summed(collect(made_RD, by, X), weight_MX).reshape(x_BTD.shape)

    def with_capacity(self, x_BTD: jax.Array, routing: Routing, *, factor: float) -> tuple[jax.Array, jax.Array]:
        """What each expert makes of at most `capacity` choices a row, and how many choices found no place."""
        B, T, D = x_BTD.shape
        X, E = self.chosen, self.count
        capacity = min(T, -int(-factor * T * X // E))  # a token chooses an expert once

        def row(x_TD: jax.Array, experts_TX: jax.Array, weights_TX: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
            # The best choices of all tokens come first, so a second choice never takes the place of a first.
            by = by_expert(experts_TX.T, E)
            starts_E = jnp.cumsum(by.sizes) - by.sizes
            places_EC = starts_E[:, None] + jnp.arange(capacity)
            taken_EC = jnp.arange(capacity) < by.sizes[:, None]
            choice_EC = by.order[jnp.minimum(places_EC, T * X - 1)]
            given_ECD = jnp.where(taken_EC[..., None], x_TD[choice_EC % T], 0)
            if self.weigh_input:
                given_ECD *= weights_TX.T.reshape(-1)[choice_EC][..., None].astype(given_ECD.dtype)
            place_TX = (by.inverse - jnp.append(starts_E, 0)[experts_TX.T.reshape(-1)]).reshape(X, T).T
            return given_ECD, place_TX, (place_TX < capacity) & (experts_TX < E), jnp.sum(jnp.maximum(by.sizes - capacity, 0))

        given_BECD, place_BTX, kept_BTX, dropped_B = jax.vmap(row)(x_BTD, routing.experts, routing.weights)
        # On a mesh rows leave for the devices that own their experts here, and come back below.
        given_EBCD = constrain(jnp.swapaxes(given_BECD, 0, 1), "experts", "batch_of_experts", None, None)
        made_EBCD = self._each(given_EBCD.reshape(E, B * capacity, D)).reshape(given_EBCD.shape)
        made_EBCD = constrain(made_EBCD, "experts", "batch_of_experts", None, None)
        made_BECD = constrain(jnp.swapaxes(made_EBCD, 0, 1), "batch", None, None, None)
        where = jnp.minimum(routing.experts, E - 1), jnp.minimum(place_BTX, capacity - 1)
        collected_BTXD = jax.vmap(lambda made_ECD, experts_TX, place_TX: made_ECD[experts_TX, place_TX])(made_BECD, *where)
        return self._summed(collected_BTXD, jnp.where(kept_BTX, routing.weights, 0.0)), jnp.sum(dropped_B).astype(jnp.float32)

    def dense(self, x_BTD: jax.Array, routing: Routing) -> jax.Array:
        """[B, T, D] -> [B, T, D]."""
        E, D = self.count, x_BTD.shape[-1]
        chosen_BTXE = jax.nn.one_hot(routing.experts, E, dtype=jnp.float32)
        weight_EM = jnp.moveaxis(jnp.sum(chosen_BTXE * routing.weights[..., None], axis=2), -1, 0).reshape(E, -1)
        given_EMD = jnp.broadcast_to(x_BTD.reshape(1, -1, D), (E, weight_EM.shape[1], D))
        if self.weigh_input:
            made_EMD = self._each(given_EMD * weight_EM[..., None].astype(given_EMD.dtype))
            weight_EM = jnp.moveaxis(jnp.sum(chosen_BTXE, axis=2), -1, 0).reshape(E, -1)
        else:
            made_EMD = self._each(given_EMD)
        return jnp.einsum("em,emd->md", weight_EM, made_EMD.astype(jnp.float32)).astype(x_BTD.dtype).reshape(x_BTD.shape)

    def _each(self, x_EMD: jax.Array) -> jax.Array:
        """Rows of their own for every expert, [E, M, D] -> [E, M, D]."""

        def of_expert(x_MD: jax.Array, w: ExpertWeights) -> jax.Array:
            gate_MF = matmul(x_MD, w.gate) + (0 if w.gate_bias is None else w.gate_bias.astype(x_MD.dtype))
            up_MF = matmul(x_MD, w.up) + (0 if w.up_bias is None else w.up_bias.astype(x_MD.dtype))
            made_MD = matmul(gated(self.activation, self.limit, gate_MF, up_MF), w.down)
            return made_MD + (0 if w.down_bias is None else w.down_bias.astype(x_MD.dtype))

        return jax.vmap(of_expert)(x_EMD, self.weights)

    def _summed(self, made_MXD: jax.Array, weights_MX: jax.Array) -> jax.Array:
        """[..., X, D] -> [..., D]: what a token's experts make, weighted and added in a fixed order, so that repeats are equal to the bit."""
        if self.weigh_input:
            weights_MX = (weights_MX > 0).astype(jnp.float32)
        return jnp.sum(weights_MX[..., None] * made_MXD.astype(jnp.float32), axis=-2).astype(made_MXD.dtype)


def _biased(x_RF: jax.Array, bias_EF: jax.Array | None, by: By) -> jax.Array:
    """Each row with the bias of its expert."""
    if bias_EF is None:
        return x_RF
    return x_RF + bias_EF[jnp.minimum(by.experts, bias_EF.shape[0] - 1)].astype(x_RF.dtype)
