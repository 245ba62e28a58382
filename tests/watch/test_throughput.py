"""Peaks, FLOPs and rates against figures worked out by hand."""

from typing import NamedTuple

import numpy as np
import pytest

from telamon.watch.throughput import (
    AttentionCost,
    Peak,
    Throughput,
    attention_pairs,
    device_peak,
    find_peak,
    flops_per_token,
    measured_cpu_peak,
)


class Device(NamedTuple):
    platform: str
    device_kind: str


@pytest.mark.parametrize(
    ("kind", "tflops", "gigabytes"),
    [
        ("TPU v4", 275, 32),
        ("TPU v5 lite", 197, 16),
        ("TPU v5", 459, 95),
        ("TPU v5p", 459, 95),
        ("TPU v6 lite", 918, 32),
        ("TPU7x", 2307 / 2, 96),  # a chip is two devices
        ("NVIDIA A100-SXM4-40GB", 312, 40),
        ("NVIDIA A100 80GB PCIe", 312, 80),
        ("NVIDIA H100 80GB HBM3", 989, 80),
        ("NVIDIA H200", 989, 141),
        ("NVIDIA B200", 2250, 180),
    ],
)
def test_peaks_are_dense_and_per_device(kind, tflops, gigabytes):
    peak = device_peak(kind)
    assert peak is not None and peak.source
    assert peak.flops == pytest.approx(tflops * 1e12)
    assert peak.memory_bytes == gigabytes * 10**9


@pytest.mark.parametrize("kind", ["Riesenrechner 9", "NVIDIA H100 PCIe", "TPU v2", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"])
def test_an_unknown_device_gets_no_mfu_and_a_line_that_says_why(kind):
    """A guess (the SXM board's figure for the slower PCIe board, say) would be wrong by tens of per cent."""
    peak, line = find_peak(Device(platform="gpu", device_kind=kind))
    assert peak is None
    assert kind in line and "no MFU" in line and "watch.peak_tflops" in line
    meter = Throughput(flops_per_token=1.0, peak=None, devices=1)
    for _ in range(3):
        meter.step(real_tokens=1, places=1)
    reading = meter.read()
    assert reading is not None and "mfu" not in reading.metrics()


def test_the_config_overrides_the_table():
    device = Device(platform="gpu", device_kind="NVIDIA H200")
    peak, line = find_peak(device, override_tflops=500)
    assert peak is not None and peak.flops == 500e12 and "watch.peak_tflops" in line


def test_the_cpu_peak_is_measured_and_a_product_does_not_exceed_it_by_much():
    import time

    import jax
    import jax.numpy as jnp

    peak = measured_cpu_peak(0.2)
    assert peak.source.startswith("measured")
    left = jnp.ones((512, 512), jnp.float32)
    product = jax.jit(jnp.matmul)
    product(left, left).block_until_ready()
    start = time.perf_counter()
    for _ in range(10):
        product(left, left).block_until_ready()
    rate = 10 * 2 * 512**3 / (time.perf_counter() - start)
    # Loose: the machine is shared. Wrong units or a wrong FLOP count are off by more.
    assert 0.02 < rate / (peak.flops * jax.local_device_count()) < 5


def brute_pairs(seq_len, window=None, chunk=None):
    q, k = np.arange(seq_len)[:, None], np.arange(seq_len)[None, :]
    seen = k <= q
    if window:
        seen &= q - k < window
    if chunk:
        seen &= q // chunk == k // chunk
    return int(seen.sum())


@pytest.mark.parametrize(
    ("options", "exact", "average"),
    [
        ({}, 2_098_176, 2_097_152),
        ({"window": 512}, 917_760, 917_504),
        ({"chunk": 256}, 263_168, 262_144),
    ],
)
def test_only_attention_pairs_that_exist_are_counted(options, exact, average):
    """Causal, causal with a window, causal in chunks, over 2,048 positions."""
    assert attention_pairs(2048, exact=True, **options) == exact == brute_pairs(2048, **options)
    assert attention_pairs(2048, **options) == average


@pytest.mark.parametrize("options", [{}, {"window": 3}, {"window": 7}, {"window": 50}, {"chunk": 3}, {"chunk": 5}, {"chunk": 50}])
def test_pairs_of_odd_lengths(options):
    assert attention_pairs(17, exact=True, **options) == brute_pairs(17, **options)


def test_flops_follow_the_one_rule():
    """Two layers, 1,280 matmul parameters (tied and untied alike), no attention: 6 x 1,280 = 7,680 a token."""
    assert flops_per_token(1280, seq_len=16) == 7680
    layers, seq_len, d_attn = 2, 16, 8
    cost = flops_per_token(1280, seq_len=seq_len, attention=[AttentionCost(d_attn)] * layers)
    assert cost == 6 * 1280 + 6 * layers * seq_len * d_attn


def test_a_window_lowers_the_flops():
    full = flops_per_token(1000, seq_len=2048, attention=[AttentionCost(512)] * 2)
    half = flops_per_token(1000, seq_len=2048, attention=[AttentionCost(512), AttentionCost(512, window=512)])
    assert half < full
    assert full - half == pytest.approx(12 * 512 * (2_097_152 - 917_504) / 2048)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_rates_leave_out_the_first_step_and_pauses():
    clock = Clock()
    meter = Throughput(flops_per_token=10.0, peak=Peak(1000.0, "test"), devices=2, clock=clock)

    def step(seconds, wait):
        with meter.waiting():
            clock.now += wait
        clock.now += seconds - wait
        meter.step(real_tokens=75, places=100)

    step(50.0, 5.0)  # compiles
    assert meter.read() is None
    for _ in range(4):
        step(2.0, 0.5)
        with meter.paused():
            clock.now += 30.0
    reading = meter.read()
    assert reading is not None
    assert reading.metrics() == pytest.approx(
        {"tokens_per_second": 37.5, "padded_tokens_per_second": 50.0, "step_seconds": 2.0, "data_wait": 0.25, "mfu": 50 * 10 / 2000}
    )
    step(4.0, 0.0)
    clock.now += 100.0  # samples, the last checkpoint
    later, overall = meter.read(), meter.overall()
    assert later is not None and later.step_seconds == 4.0 and later.data_wait == 0.0
    assert overall is not None and overall.step_seconds == pytest.approx(12.0 / 5)
