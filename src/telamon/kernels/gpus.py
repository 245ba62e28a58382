"""Which GPU a program is traced for, also where it is not at hand, and tracing that libraries believe to be there.

Libraries ask the machine for its GPU where they choose or refuse a kernel. A program that is compiled for GPUs elsewhere must
get the kernels of those, so that for the time of such a trace the questions are answered from the chip's description.
"""

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from telamon.config.hardware import chip_of_kind
from telamon.config.presets import ROOT
from telamon.parallel.target import Target


@dataclass(frozen=True)
class Gpu:
    """What kernels depend on. The names are those of `jax.Device`."""

    device_kind: str
    compute_capability: str
    """NVIDIA's number of an architecture: 8.0 Ampere, 9.0 Hopper, 10.0 Blackwell."""
    core_count: int
    here: bool
    """It is this machine's."""
    platform: str = "gpu"

    @property
    def capability(self) -> tuple[int, ...]:
        """`compute_capability` as numbers."""
        return tuple(int(part) for part in self.compute_capability.split("."))


def gpu_of(target: Target) -> Gpu | None:
    """The NVIDIA GPU of a target; none where it is another's, or neither here nor described in `presets/hardware`."""
    if jax.default_backend() == "gpu":
        device = jax.devices()[0]
        if "NVIDIA" in device.device_kind and target.device_kind in ("", device.device_kind):
            return Gpu(device.device_kind, device.compute_capability, device.core_count, here=True)
    chip = chip_of_kind(target.device_kind)
    if chip is None or chip.platform != "gpu":
        return None
    text = (ROOT / "hardware" / f"{chip.key}.txtpb").read_text(encoding="utf-8")
    capability = re.search(r"cuda_compute_capability \{(.*?)\}", text, re.DOTALL)
    cores = re.search(r"\bcore_count: (\d+)", text)
    assert capability is not None and cores is not None, chip.key
    major, minor = (re.search(rf"\b{part}: (\d+)", capability[1]) for part in ("major", "minor"))
    assert major is not None, chip.key
    return Gpu(target.device_kind, f"{major[1]}.{0 if minor is None else minor[1]}", int(cores[1]), here=False)


@contextlib.contextmanager
def answering(*answers: tuple[Any, str, Callable[..., Any]]) -> Iterator[None]:
    """While it is entered, functions of modules are others: (module, name, function)."""
    with contextlib.ExitStack() as stack:
        for module, name, function in answers:
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, function)
        yield


@contextlib.contextmanager
def tokamax_as_on(gpu: Gpu | None) -> Iterator[None]:
    """A context in which Tokamax takes this machine for one with that GPU, and is silent on shapes that it was not tuned for."""
    from jax.extend import backend

    answers: list[tuple[Any, str, Any]] = []
    if gpu is not None and not gpu.here:
        answers.append((backend, "get_default_device", lambda: gpu))
    logger = logging.getLogger("absl")
    logger.addFilter(_is_news)
    try:
        with answering(*answers):
            yield
    finally:
        logger.removeFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("Autotuning cache miss")


def traced_within(context: Callable[[], contextlib.AbstractContextManager[None]], function: Callable[..., jax.Array]) -> Any:
    """`function(q, k, v, places, sinks)` with both passes traced within a context; gradients are of q, k and v.

    The backward pass of a kernel is traced later than its forward pass, when a context around the call is left already.
    """

    def within(q: jax.Array, k: jax.Array, v: jax.Array, *rest: Any) -> jax.Array:
        with context():
            return function(q, k, v, *rest)

    def forward(q: jax.Array, k: jax.Array, v: jax.Array, *rest: Any) -> Any:
        with context():
            return jax.vjp(lambda q, k, v: function(q, k, v, *rest), q, k, v)

    def backward(pull: Any, d_out: jax.Array) -> Any:
        with context():
            return (*pull(d_out), None, None)

    call = jax.custom_vjp(within)
    call.defvjp(forward, backward)
    return call
