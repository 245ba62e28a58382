"""Attention written out, which every other path is tested against."""

import jax
import jax.numpy as jnp

from telamon.kernels.attention.rule import HIDDEN, Scores


def reference_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, *, scores: Scores, sinks: jax.Array | None = None
) -> jax.Array:
    """Softmax attention written out (Vaswani et al. 2017, eq. 1), with softmax in float32.

    Args:
        q: queries [B, T, N, H]. Query head n reads kv head n // G, with G = N / K.
        k: keys [B, S, K, H].
        v: values [B, S, K, H], or of another width.
        mask: what each query sees [B, T, S]; a query that sees nothing gets zeros.
        scores: how products become scores; its window and chunk are not applied here, but by the mask.
        sinks: one more score for each query head [N], which takes its share of the softmax and gives no value (gpt-oss model
            card, OpenAI 2025, section 2.2; for the effect, Xiao et al. 2023). Neither scaled nor capped.

    Returns:
        [B, T, N, H], of the values' width, in the type of `v`.
    """
    B, T, N, H = q.shape
    K = k.shape[2]
    q_BTKGH = q.reshape(B, T, K, N // K, H)
    scores_BKGTS = scores.of(jnp.einsum("btkgh,bskh->bkgts", q_BTKGH, k, preferred_element_type=jnp.float32))
    seen = mask[:, None, None, :, :]
    scores_BKGTS = jnp.where(seen, scores_BKGTS, HIDDEN)
    if sinks is not None:
        sinks_BKGT1 = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(K, N // K, 1, 1), (B, K, N // K, T, 1))
        scores_BKGTS = jnp.concatenate([scores_BKGTS, sinks_BKGT1], axis=-1)
    weights_BKGTS = jnp.where(seen, jax.nn.softmax(scores_BKGTS, axis=-1)[..., : k.shape[1]], 0.0)
    out_BTKGH = jnp.einsum("bkgts,bskh->btkgh", weights_BKGTS.astype(v.dtype), v)
    return out_BTKGH.reshape(B, T, N, v.shape[3])
