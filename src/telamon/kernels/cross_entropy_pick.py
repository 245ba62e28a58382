"""Which path of cross-entropy runs: Tokamax's kernel on TPUs where it can, else chunks in plain XLA."""

from typing import Any

import jax

from telamon.kernels import cross_entropy as chunked
from telamon.kernels import cross_entropy_tpu, picks
from telamon.kernels.cross_entropy import CrossEntropy
from telamon.kernels.cross_entropy_tpu import Request
from telamon.kernels.picks import Pick
from telamon.parallel.target import target

_REFUSALS: dict[str, Any] = {"tokamax": cross_entropy_tpu.refusal, "chunked": lambda request: None}

PLATFORMS: dict[str, tuple[str, ...]] = {"tpu": ("tokamax", "chunked"), "gpu": ("chunked",), "cpu": ("chunked",)}
"""Paths in the order in which `auto` tries them. (Tokamax 0.0.17 has this kernel for TPUs alone.)"""


def choose(request: Request, wanted: str = "auto") -> Pick:
    """The path for a request; see `telamon.kernels.picks.choose`."""
    return picks.choose("loss", _REFUSALS, PLATFORMS, request, wanted=wanted)


def cross_entropy(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    mask: jax.Array,
    *,
    chunk: int,
    z_loss: float = 0.0,
    softcap: float | None = None,
    vocab: int | None = None,
    path: str = "auto",
) -> CrossEntropy:
    """As `telamon.kernels.cross_entropy.cross_entropy`, by the path named, or for `auto` by the first that serves.

    Raises:
        ConfigError: the named path cannot do what is asked, with the reason.
    """
    (B, T, D), V = hidden.shape, head.shape[1]
    request = Request(target(), B, T, D, V, vocab or V, str(hidden.dtype), z_loss, softcap)
    if choose(request, path).path == "tokamax":
        return cross_entropy_tpu.run(hidden, head, targets, mask)
    return chunked.cross_entropy(hidden, head, targets, mask, chunk=chunk, z_loss=z_loss, softcap=softcap, vocab=vocab)
