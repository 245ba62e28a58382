"""Choosing between implementations of one operation, and keeping note of what was chosen while a program is traced."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from telamon.errors import ConfigError
from telamon.parallel.target import Target

OPTIONS = {"attention": "train.attention", "loss": "train.loss", "experts": "train.experts.path"}
"""For each operation, the option that names a path."""

_NOTES: ContextVar[list["Pick"] | None] = ContextVar("picks", default=None)


class Asked(Protocol):
    """What is asked of an operation."""

    @property
    def target(self) -> Target:
        """The devices that it is for."""
        ...


@dataclass(frozen=True)
class Pick:
    """A choice, and what was passed over for it."""

    operation: str
    """What is computed; its option is in `OPTIONS`."""
    path: str
    """The path chosen."""
    refused: tuple[tuple[str, str], ...] = ()
    """(name, reason) of each path that comes before it and cannot serve."""

    def __str__(self) -> str:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.refused)
        return f"{self.operation}: {self.path}" + (f" ({reasons})" if reasons else "")


@contextlib.contextmanager
def noted() -> Iterator[list[Pick]]:
    """Collects the picks made in this thread while programs are traced, each once, in order."""
    notes: list[Pick] = []
    token = _NOTES.set(notes)
    try:
        yield notes
    finally:
        _NOTES.reset(token)


def on_platform(platforms: Mapping[str, tuple[str, ...]], platform: str) -> tuple[str, ...]:
    """An operation's paths on a platform, in the order in which `auto` tries them; on one that it does not name, those of a CPU."""
    return platforms.get(platform, platforms["cpu"])


def choose[R: Asked](
    operation: str, refusals: Mapping[str, Callable[[R], str | None]], platforms: Mapping[str, tuple[str, ...]], request: R, *, wanted: str
) -> Pick:
    """The path for a request on the platform that it is for.

    Args:
        operation: what is computed, as in `Pick`.
        refusals: for each path what says why it refuses a request (None: it serves).
        platforms: for each platform its paths, in the order in which `auto` tries them.
        request: what is asked, and of which device.
        wanted: a path by name, or `auto`.

    Raises:
        ConfigError: the named path refuses, or none serves; with each reason.
    """
    platform = request.target.platform
    paths = {name: refusals[name] for name in on_platform(platforms, platform)}
    return first_that_serves(operation, paths, request, wanted=wanted, platform=platform)


def first_that_serves[R](operation: str, paths: Mapping[str, Callable[[R], str | None]], request: R, *, wanted: str, platform: str) -> Pick:
    """The first path that does not refuse the request, or the one wanted; noted.

    Args:
        operation: what is computed, as in `Pick`.
        paths: for each path of the platform, in order of preference, what says why it refuses a request (None: it serves).
        request: what is asked.
        wanted: the name of a path, or `auto`.
        platform: for the message.

    Raises:
        ConfigError: the path wanted refuses or is not of this platform, or every path refuses.
    """
    check_name(operation, paths, wanted=wanted, platform=platform)
    refused: list[tuple[str, str]] = []
    for name in paths if wanted == "auto" else (wanted,):
        reason = paths[name](request)
        if reason is None:
            return note(Pick(operation, name, tuple(refused)))
        refused.append((name, reason))
    if wanted != "auto":
        raise ConfigError(f"{OPTIONS[operation]}={wanted} cannot serve this model: {refused[0][1]}; auto takes a path that can")
    raise ConfigError(f"no path of {operation} serves on {platform}: {'; '.join(f'{name}: {reason}' for name, reason in refused)}")


def check_name(operation: str, paths: Iterable[str], *, wanted: str, platform: str) -> None:
    """Raise ConfigError where `wanted` is neither `auto` nor one of a platform's paths. Whether it serves a request is not asked."""
    if wanted != "auto" and wanted not in paths:
        raise ConfigError(f"{OPTIONS[operation]}={wanted} is not for {platform}; there it is one of: auto, {', '.join(paths)}")


def note(pick: Pick) -> Pick:
    """Add a choice to those that are collected, where they are (see `noted`), and return it."""
    notes = _NOTES.get()
    if notes is not None and pick not in notes:
        notes.append(pick)
    return pick
