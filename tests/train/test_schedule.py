import itertools
from typing import Any

import pytest
import tiny

from telamon.config.schema import OptimizerConfig, RampStage, RunConfig, ScheduleConfig, TrainConfig
from telamon.train.schedule import describe_schedule, learning_rate_schedule

PEAK = 2e-3


def _run(steps: int = 500, stop_at: int | None = None, **schedule: Any) -> RunConfig:
    settings = {"warmup_fraction": 0.1, **schedule}
    return tiny.run(optimizer=OptimizerConfig(learning_rate=PEAK, schedule=ScheduleConfig(**settings)), steps=steps, stop_at=stop_at)


def _rates(config: RunConfig, *steps: int) -> list[float]:
    rate: Any = learning_rate_schedule(config)
    return [float(rate(step)) for step in steps]


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_warm_up_of_a_tenth_of_500_steps_ends_at_the_peak_at_step_50(kind: Any):
    """A length from another run would leave step 50 far below the peak."""
    first, before, at = _rates(_run(kind=kind), 0, 49, 50)
    assert at == pytest.approx(PEAK, rel=1e-6)
    assert before == pytest.approx(PEAK * 50 / 51, rel=1e-5)
    assert first == pytest.approx(PEAK / 51, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "middle"),
    [
        # Half-way between steps 50 and 499, a cosine is half-way between its peak and its end.
        ("cosine", {274: 0.5 * (1 + 0.1)}),
        # Stable to step 299, then 200 steps down to a tenth.
        ("wsd", {51: 1.0, 299: 1.0, 399: 0.55}),
        ("constant", {250: 1.0}),
    ],
)
def test_shapes(kind: Any, middle: dict[int, float]):
    config = _run(kind=kind, final_fraction=0.1)
    for step, share in middle.items():
        assert _rates(config, step)[0] == pytest.approx(PEAK * share, rel=5e-3), step
    assert _rates(config, 499)[0] == pytest.approx(PEAK * (1.0 if kind == "constant" else 0.1), rel=1e-5)


def test_rates_fall_without_a_jump():
    rates = _rates(_run(steps=60, kind="wsd", warmup_fraction=0.2), *range(60))
    assert max(abs(b - a) for a, b in itertools.pairwise(rates)) < 0.1 * PEAK
    assert rates[12] == max(rates)


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (2, 2), (3, 0)])
def test_the_shortest_runs_have_finite_rates(kind: Any, steps: int, warmup: int):
    rates = _rates(_run(steps=steps, kind=kind, warmup_steps=warmup), *range(steps))
    assert all(0 < rate <= PEAK * (1 + 1e-6) for rate in rates)


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
@pytest.mark.parametrize("stop_at", [50, 400])
def test_stopping_early_does_not_bend_the_schedule(kind: Any, stop_at: int):
    """A 500-step plan stopped at step 50, or within its decay, has the plan's rates."""
    steps = [*range(0, stop_at, 7), stop_at]
    assert _rates(_run(stop_at=stop_at, kind=kind), *steps) == _rates(_run(kind=kind), *steps)
    assert _rates(_run(steps=stop_at, kind=kind), *steps) != _rates(_run(kind=kind), *steps)


def test_the_log_line_states_first_peak_and_last_rate():
    line = describe_schedule(_run(kind="cosine", final_fraction=0.1))
    assert line == "learning rate 3.92e-05 at step 1, 0.002 (peak) at step 51, 0.0002 at step 500 (cosine)"


def test_the_log_line_of_a_run_without_warmup_states_its_peak_once():
    line = describe_schedule(_run(kind="cosine", final_fraction=0.1, warmup_steps=0))
    assert line == "learning rate 0.002 (peak) at step 1, 0.0002 at step 500 (cosine)"


def test_a_batch_ramp_is_a_function_of_the_global_step():
    """2 -> 4 -> 8 with changes at steps 10 and 20: 4 at step 15, resumed or not."""
    ramp = (RampStage(step=10, batch_size=4), RampStage(step=20, batch_size=8))
    train = TrainConfig(steps=30, batch_size=2, batch_ramp=ramp)
    assert [train.batch_size_at(step) for step in (0, 9, 10, 15, 19, 20, 29)] == [2, 2, 4, 4, 4, 8, 8]
    assert [train.rows_before(step) for step in range(31)] == [sum(train.batch_size_at(s) for s in range(step)) for step in range(31)]
