"""Which path of attention serves a request: the first of its platform's list that does not refuse."""

from collections.abc import Callable
from typing import Any, NamedTuple

from telamon.kernels.attention import chunked, cudnn, flash_tokamax, splash
from telamon.kernels.attention.rule import Request
from telamon.kernels.picks import Pick, first_that_serves, noted

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
    """The path for a request.

    Args:
        request: what is asked, and of which device.
        wanted: a path by name, or `auto`.

    Raises:
        ConfigError: the named path refuses, or none serves; with each reason.
    """
    order = PLATFORMS.get(request.target.platform, ("chunked",))
    refusals = {name: PATHS[name].refusal for name in order}
    return first_that_serves("attention", refusals, request, wanted=wanted, platform=request.target.platform)
