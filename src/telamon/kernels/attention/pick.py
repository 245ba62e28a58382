"""Which path of attention serves a request: the first of its platform's list that does not refuse."""

from collections.abc import Callable
from typing import Any, NamedTuple

from telamon.kernels import picks
from telamon.kernels.attention import chunked, cudnn, flash_tokamax, splash
from telamon.kernels.attention.rule import Request
from telamon.kernels.picks import Pick, noted

__all__ = ["PATHS", "PLATFORMS", "Pick", "Request", "choose", "noted"]


class Path(NamedTuple):
    """A way to compute attention."""

    refusal: Callable[[Request], str | None]
    """Why a request cannot be served; None: it can."""
    run: Callable[..., Any]
    """Arguments as of `telamon.kernels.attention.attention`, without `path`."""


PATHS: dict[str, Path] = {
    "splash": Path(splash.refusal, splash.run),
    "cudnn": Path(cudnn.refusal, cudnn.run),
    "tokamax": Path(flash_tokamax.refusal, flash_tokamax.run),
    "chunked": Path(chunked.refusal, chunked.run),
}

PLATFORMS: dict[str, tuple[str, ...]] = {
    "tpu": ("splash", "chunked"),
    "gpu": ("cudnn", "tokamax", "chunked"),
    "cpu": ("chunked",),
}
"""Paths in the order in which `auto` tries them."""


def choose(request: Request, wanted: str = "auto") -> Pick:
    """The path for a request; see `telamon.kernels.picks.choose`."""
    return picks.choose("attention", {name: path.refusal for name, path in PATHS.items()}, PLATFORMS, request, wanted=wanted)
