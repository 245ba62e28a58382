"""Grouped-query attention: one function, several paths, and a plain reference.

Which path runs is decided where a program is traced, from the device it is for and from what is asked of it (`pick`).
"""

import jax

from telamon.kernels.attention.pick import PATHS, choose
from telamon.kernels.attention.reference import reference_attention
from telamon.kernels.attention.rule import SAVED, Places, Request, Scores, visible
from telamon.parallel.target import target

__all__ = ["SAVED", "Places", "Scores", "attention", "reference_attention", "visible"]


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    queries: Places,
    keys: Places,
    scores: Scores,
    aligned: bool,
    sinks: jax.Array | None = None,
    path: str = "auto",
) -> jax.Array:
    """Softmax attention in which each query sees the keys that `visible` says; a query that sees none gets zeros.

    Args:
        q: queries [B, T, N, H]. Query head n reads kv head n // G, with G = N / K.
        k: keys [B, S, K, H].
        v: values [B, S, K, H], or of another width than the keys', as in latent attention.
        queries, keys: where the queries [B, T] and the keys [B, S] are.
        scores: how products become scores, the window and the chunk.
        aligned: keys are the queries' own tokens in the same order, and positions rise by one within a segment; so no query
            sees a later index, and distances in a row are those in the document.
        sinks: see `reference_attention`.
        path: a name of `pick.PATHS`, or `auto`, the first that serves. Calls that are not aligned always take that one: what
            a run names is for its training rows.

    Returns:
        [B, T, N, H], of the values' width, in the type of `v`.

    Raises:
        ConfigError: the named path cannot do what is asked, with the reason.
    """
    (B, T, N, H), (_, S, K, _) = q.shape, k.shape
    request = Request(target(), B, T, S, N, K, max(H, v.shape[3]), str(q.dtype), scores, sinks is not None, aligned)
    picked = choose(request, path if aligned else "auto")
    return PATHS[picked.path].run(q, k, v, queries=queries, keys=keys, scores=scores, aligned=aligned, sinks=sinks)
