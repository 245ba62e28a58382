"""Tokens per second, and what share of the machine they use.

Model FLOPs utilisation (MFU) is quoted by one rule: ``6 · (matmul parameters) + 6 · L · T · d_attn`` FLOPs a token.
Matmul parameters are all but the input embedding's look-up; the head's matrix counts once, tied or not; of a
mixture's experts, those a token uses. Attention is counted causal and by its window; nothing recomputed counts.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from telamon.config.hardware import chip_of_kind


@dataclass(frozen=True)
class Peak:
    """The most that one JAX device can compute."""

    flops: float
    """Dense FLOP/s."""
    source: str
    """Where the figure is from."""
    memory_bytes: int | None = None
    """Size of the device's memory as sold; none where the table does not say."""


def device_peak(device_kind: str) -> Peak | None:
    """Peak of one device from `presets/hardware`, bf16 and dense; none for a device that is not in the table.

    Args:
        device_kind: as `jax.Device.device_kind` gives it, such as ``TPU v6 lite``.
    """
    chip = chip_of_kind(device_kind)
    return chip and Peak(chip.flops, f"{chip.name}: {chip.sources['bf16_tflops']}", chip.memory_bytes)


def measured_cpu_peak(seconds: float = 0.3) -> Peak:
    """Peak of one CPU device: the best rate of XLA's own matrix product, of bf16 and fp32 the faster.

    The machine's rate is divided among its JAX devices, which share its cores.

    Args:
        seconds: time to spend measuring, compilation aside.
    """
    import jax
    import jax.numpy as jnp

    rates = {}
    size = 1024
    for dtype in (jnp.bfloat16, jnp.float32):
        left = jnp.ones((size, size), dtype)
        product = jax.jit(jnp.matmul).lower(left, left).compile()
        rates[jnp.dtype(dtype).name] = 2 * size**3 / _best_seconds(lambda p=product, x=left: p(x, x).block_until_ready(), seconds / 2)
    best = max(rates.values())
    listed = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in rates.items())
    return Peak(best / jax.local_device_count(), f"measured: matrix product of {size} x {size}, {listed} GFLOP/s for the whole machine")


def _best_seconds(call: Callable[[], object], seconds: float) -> float:
    best, end = float("inf"), time.perf_counter() + seconds
    call()
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


class Device(Protocol):
    """What is asked of a `jax.Device`."""

    @property
    def platform(self) -> str:
        """Such as ``cpu``."""
        ...

    @property
    def device_kind(self) -> str:
        """Such as ``TPU v6 lite``."""
        ...


def find_peak(device: Device, *, override_tflops: float | None = None) -> tuple[Peak | None, str]:
    """The peak that MFU is quoted against, and a line that says which it is or why there is none.

    Args:
        device: one of the run's devices (they are alike).
        override_tflops: `watch.peak_tflops` of the config.
    """
    if override_tflops is not None:
        peak = Peak(override_tflops * 1e12, "watch.peak_tflops")
    elif device.platform == "cpu":
        peak = measured_cpu_peak()
    else:
        peak = device_peak(device.device_kind)
    if peak is None:
        return None, f"no MFU: the peak of {device.device_kind!r} is not known; give watch.peak_tflops to have one"
    return peak, f"peak of a device: {peak.flops / 1e12:,.3g} TFLOP/s ({peak.source})"


def attention_pairs(seq_len: int, *, window: int | None = None, chunk: int | None = None, exact: bool = False) -> float:
    """Query-key pairs of causal attention over a row.

    Args:
        seq_len: row length T.
        window: a query sees the last `window` positions, itself included.
        chunk: a query sees its own chunk of this length only.
        exact: count pairs; otherwise the MFU rule's average, T²/2 (T·W - W²/2 with a window), which leaves half
            the diagonal out.
    """
    if window is not None and chunk is not None:
        raise ValueError(f"attention has a window or a chunk, not both; got window={window}, chunk={chunk}")
    if chunk is not None and chunk < seq_len:
        whole, rest = divmod(seq_len, chunk)
        return whole * attention_pairs(chunk, exact=exact) + attention_pairs(rest, exact=exact)
    seen = seq_len if window is None else min(window, seq_len)
    diagonal = seen / 2 if exact else 0.0
    return seq_len * seen - seen * seen / 2 + diagonal


@dataclass(frozen=True)
class AttentionCost:
    """What the FLOPs rule needs to know of one attention layer."""

    d_attn: float
    """Query heads x head size; where keys and values differ in size, query heads x the mean of the two."""
    window: int | None = None
    """Positions a query sees, itself included; none: all before it."""
    chunk: int | None = None
    """Length of the chunks that attention stays in; none: not chunked."""


def flops_per_token(matmul_parameters: int, *, seq_len: int, attention: Iterable[AttentionCost] = ()) -> float:
    """FLOPs of forward and backward for one token, by the rule at the head of this file.

    Args:
        matmul_parameters: parameters a token is multiplied with: all but the embedding's look-up, the head's matrix
            once (tied or not), of the experts those a token uses.
        seq_len: row length T.
        attention: each attention layer.
    """
    # A pair costs 2 d_attn FLOPs for its score and 2 d_attn for its value, and the backward pass twice that.
    pairs = sum(12 * layer.d_attn * attention_pairs(seq_len, window=layer.window, chunk=layer.chunk) for layer in attention)
    return 6 * matmul_parameters + pairs / seq_len


@dataclass(frozen=True)
class Reading:
    """Speed over a stretch of steps; units as in `telamon.watch`."""

    tokens_per_second: float
    padded_tokens_per_second: float
    step_seconds: float
    data_wait: float
    mfu: float | None

    def metrics(self) -> dict[str, float]:
        """The figures under their metric names; MFU is absent where the peak is unknown."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass
class _Stretch:
    steps: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    real: float = 0.0
    places: float = 0.0


class Throughput:
    """Measures a training loop from the outside.

    The first step, which compiles, is left out: the clock starts when it has been counted. MFU counts every place
    of a batch, as published figures do; how many were padding shows in the two token rates.
    """

    def __init__(self, *, flops_per_token: float, peak: Peak | None, devices: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._flops, self._devices, self._clock = flops_per_token, devices, clock
        self._peak = peak
        self._started = False
        self._mark = 0.0
        self._since_read, self._all = _Stretch(), _Stretch()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around fetching a batch: the time counts as waiting for data."""
        start = self._clock()
        yield
        if self._started:
            for stretch in (self._since_read, self._all):
                stretch.waited += self._clock() - start

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Around what is not training (evaluation, a blocking save): the time does not count."""
        self._tick()
        yield
        self._mark = self._clock()

    def step(self, *, real_tokens: float, places: int) -> None:
        """Count a step; the first one starts the clock.

        Args:
            real_tokens: trained tokens (mask > 0) of the step, over all processes.
            places: rows x row length of the step, over all processes.
        """
        self._tick()
        if not self._started:
            self._started = True
            return
        for stretch in (self._since_read, self._all):
            stretch.steps += 1
            stretch.real += real_tokens
            stretch.places += places

    def read(self) -> Reading | None:
        """Speed since the last reading, up to the last step counted; none where there was none."""
        stretch, self._since_read = self._since_read, _Stretch()
        return self._reading(stretch)

    def overall(self) -> Reading | None:
        """Speed from the first step to the last; none where no step was counted. What came after the last (samples, a save) is left out."""
        return self._reading(self._all)

    def _tick(self) -> None:
        now = self._clock()
        if self._started:
            for stretch in (self._since_read, self._all):
                stretch.seconds += now - self._mark
        self._mark = now

    def _reading(self, stretch: _Stretch) -> Reading | None:
        if stretch.steps == 0 or stretch.seconds <= 0:
            return None
        rate = stretch.places / stretch.seconds
        mfu = None if self._peak is None else rate * self._flops / (self._devices * self._peak.flops)
        return Reading(
            tokens_per_second=stretch.real / stretch.seconds,
            padded_tokens_per_second=rate,
            step_seconds=stretch.seconds / stretch.steps,
            data_wait=stretch.waited / stretch.seconds,
            mfu=mfu,
        )
