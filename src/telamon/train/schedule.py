"""Learning rate over the steps of the plan.

A schedule refers to the planned length, `train.steps`: stopping early or resuming does not bend it.
"""

from typing import Any

import optax

from telamon.config.schema import RunConfig


def learning_rate_schedule(config: RunConfig, *, peak: float | None = None) -> optax.Schedule:
    """The learning rate as a function of the step (from 0).

    Warm-up of w steps rises linearly and reaches the peak at step w; its first step already moves, at peak / (w + 1).
    The last step of the plan has `final_fraction` of the peak.

    Args:
        config: the run.
        peak: a group's own peak; none: `optimizer.learning_rate`.
    """
    schedule = config.optimizer.schedule
    peak = config.optimizer.learning_rate if peak is None else peak
    warmup, last = config.warmup_steps, config.train.steps - 1
    final = schedule.final_fraction * peak
    rise = optax.linear_schedule(peak / (warmup + 1), peak, max(warmup, 1))
    match schedule.kind:
        case "constant":
            return optax.join_schedules([rise, optax.constant_schedule(peak)], [warmup])
        case "cosine":
            fall = optax.cosine_decay_schedule(peak, max(last - warmup, 1), alpha=schedule.final_fraction)
            return optax.join_schedules([rise, fall], [warmup])
        case "wsd":
            decay = min(round(schedule.decay_fraction * config.train.steps), max(last - warmup, 1))
            fall = optax.linear_schedule(peak, final, max(decay, 1))
            return optax.join_schedules([rise, optax.constant_schedule(peak), fall], [warmup, max(last - decay, warmup)])


def _number(value: Any) -> float:
    return float(value)


def describe_schedule(config: RunConfig) -> str:
    """The rates at the first, the peak and the last step, as one line for the log."""
    rate, warmup, last = learning_rate_schedule(config), config.warmup_steps, config.train.steps - 1
    first = f"{_number(rate(0)):.3g} at step 1, " if warmup else ""
    return (
        f"learning rate {first}{_number(rate(warmup)):.3g} (peak) at step {warmup + 1}, "
        f"{_number(rate(last)):.3g} at step {last + 1} ({config.optimizer.schedule.kind})"
    )
