"""P7: the share of step time that saving every 20 steps costs, against the same run without saving."""

import os
import sys
import tempfile
from statistics import median

from benchmarks.processes import Program, take_turns
from benchmarks.results import Result, versions_here

ROUNDS = 5
EVERY = 20
TURN = 2 * EVERY - 1
"""Counted steps of a turn. With the one let pass, a turn is two intervals long, and each begins at the same place between saves."""

WARMUP = EVERY // 2
"""Turns begin half an interval after a save: none ends while a save is still being written."""

SAVING, PLAIN = "saving every 20 steps", "not saving"


def run(rounds: int) -> Result:
    """The default run twice, in turns."""
    with tempfile.TemporaryDirectory() as folder:
        programs = [_telamon(SAVING, folder, str(EVERY)), _telamon(PLAIN, folder, "null")]
        seconds = take_turns(programs, rounds=rounds, steps=dict.fromkeys((SAVING, PLAIN), TURN), warmup=WARMUP)
    lost = median(1 - plain / saving for saving, plain in zip(seconds[SAVING], seconds[PLAIN], strict=True))
    return Result(
        id="P7",
        title="share of step time lost to asynchronous saving every 20 steps",
        columns=("run", "ms a step", "least", "most"),
        rows=[[name, *(f"{1000 * f(s):.0f}" for f in (median, min, max))] for name, s in seconds.items()],
        figures={
            "share_lost": round(lost, 4),
            "saving_step_seconds": round(median(seconds[SAVING]), 4),
            "plain_step_seconds": round(median(seconds[PLAIN]), 4),
        },
        target="under 5 % of step time",
        holds=lost < 0.05,
        commands={name: f"telamon train default {_values(every)}" for name, every in ((SAVING, str(EVERY)), (PLAIN, "null"))},
        versions={"both": versions_here("jax", "jaxlib", "orbax-checkpoint")},
        threads=f"the machine's {len(os.sched_getaffinity(0))} cores, also for writing",
        notes=[
            "The default run: 6 M parameters, 16 rows of 256 tokens; weights, moments and the data's position are saved in the background.",
            f"Each run takes turns of {TURN} steps, two saves in each, and is stopped by signal otherwise; {rounds} rounds; the share is the median of the "
            "shares within a round.",
        ],
    )


def _values(every: str) -> str:
    return f"checkpoint.every={every} eval.every=null train.log_every=1 train.steps=100000"


def _telamon(name: str, folder: str, every: str) -> Program:
    arguments = ["default", *_values(every).split(), f"run.root={folder}/runs", f"run.name=every-{every}", f"data.cache_dir={folder}/cache"]
    return Program(name, [sys.executable, "-m", "telamon", "train", *arguments], r"^step \d+/\d+  loss")
