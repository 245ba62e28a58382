"""Which path of the grouped matmul serves a request: the first of its platform's list that does not refuse."""

from collections.abc import Callable
from typing import Any, NamedTuple

from telamon.kernels import picks
from telamon.kernels.experts import blocked, grouped_tokamax, ragged_dot
from telamon.kernels.experts.rule import Request
from telamon.kernels.picks import Pick

__all__ = ["PATHS", "PLATFORMS", "Pick", "Request", "choose"]


class Path(NamedTuple):
    """A way to multiply the rows of experts."""

    refusal: Callable[[Request], str | None]
    """Why a request cannot be served; None: it can."""
    product: Callable[..., Any]
    """x [M, K], w [E, K, N] in float32, sizes [E], transposed=False (True: w is [E, N, K]) -> [M, N] in the type of x."""
    weight_gradient: Callable[..., Any]
    """x [M, K], dy [M, N], sizes [E] -> [E, K, N] in float32."""


PATHS: dict[str, Path] = {
    "tokamax": Path(grouped_tokamax.refusal, grouped_tokamax.product, grouped_tokamax.weight_gradient),
    "blocked": Path(blocked.refusal, blocked.product, blocked.weight_gradient),
    "ragged_dot": Path(ragged_dot.refusal, ragged_dot.product, ragged_dot.weight_gradient),
}

PLATFORMS: dict[str, tuple[str, ...]] = {
    "tpu": ("tokamax", "blocked", "ragged_dot"),
    "gpu": ("tokamax", "blocked", "ragged_dot"),
    "cpu": ("blocked", "ragged_dot"),
}
"""Paths in the order in which `auto` tries them."""


def choose(request: Request, wanted: str = "auto") -> Pick:
    """The path for a request; see `telamon.kernels.picks.choose`."""
    return picks.choose("experts", {name: path.refusal for name, path in PATHS.items()}, PLATFORMS, request, wanted=wanted)
