"""A1: a training step of llama3.1-8b compiled for 16 chips that are not there: memory of a device, and time of the whole command."""

from statistics import median

from benchmarks import ahead
from benchmarks.ahead import Memory, Outcome, Turns, Work
from benchmarks.peers import MAXTEXT, python_of
from benchmarks.processes import BenchmarkError
from benchmarks.results import Result

ROUNDS = 3
WORK = Work("llama3.1-8b", "v6e-16", seq_len=4096, rows=2)
PEAK, COMMAND = 0.9, 0.5


def run(rounds: int) -> Result:
    """Both commands in turns, ours with and without code."""
    python_of(MAXTEXT)
    return result(ahead.turns(WORK, rounds, quick=True))


def result(taken: Turns) -> Result:
    """What the turns show. Raises BenchmarkError where a side made no program."""
    sides = {"Telamon": taken.telamon, "Telamon --quick": taken.quick, "MaxText": taken.maxtext}
    memories = {side: _memory(side, outcomes) for side, outcomes in sides.items()}
    pairs = list(zip(taken.telamon, taken.maxtext, strict=True))
    figures = {
        "peak_of_maxtext": memories["Telamon"].peak / memories["MaxText"].peak,
        "command_of_maxtext": median(ours.seconds / theirs.seconds for ours, theirs in pairs),
        "quick_command_of_maxtext": median(ours.seconds / theirs.seconds for ours, theirs in zip(taken.quick, taken.maxtext, strict=True)),
        "host_memory_of_maxtext": median(ours.host_bytes / theirs.host_bytes for ours, theirs in pairs),
        "telamon_peak_gb": memories["Telamon"].peak / 1e9,
        "maxtext_peak_gb": memories["MaxText"].peak / 1e9,
        "telamon_seconds": median(one.seconds for one in taken.telamon),
        "maxtext_seconds": median(one.seconds for one in taken.maxtext),
    }
    return Result(
        id="A1",
        title="llama3.1-8b's training step compiled for 16 chips of v6e on a host without any, against MaxText",
        columns=("side", "arguments GB", "temporaries", "outputs beside", "peak", "command s", "least - most", "this host's GB"),
        rows=[_row(side, memories[side], outcomes) for side, outcomes in sides.items()],
        figures={name: round(value, 3) for name, value in figures.items()},
        target=f"a device's peak at most {PEAK} × MaxText's, the command at most {COMMAND} × MaxText's",
        holds=figures["peak_of_maxtext"] <= PEAK and figures["command_of_maxtext"] <= COMMAND,
        commands=ahead.shown(WORK),
        versions=ahead.versions(),
        threads=ahead.THREADS,
        notes=[
            f"T {WORK.seq_len}, {WORK.rows} rows a device, full recomputation, pure FSDP, AdamW, weights and moments in float32, bfloat16 activations.",
            *ahead.NOTES,
            "The command that the target is about compiles as MaxText's does, to the end. With --quick ours stops the compiler once memory is "
            "assigned: every figure of the plan is there by then but the size of the code.",
            f"{len(pairs)} rounds in turns. Memory of a device is the same in every round; times are medians, and ratios of times are medians "
            "of the ratios within a round.",
        ],
    )


def _memory(side: str, outcomes: list[Outcome]) -> Memory:
    memories = {outcome.memory for outcome in outcomes}
    memory = memories.pop()
    if memory is None or memories:
        raise BenchmarkError(f"{side} made no program, or another each time: {'; '.join(map(ahead.describe, outcomes))}")
    return memory


def _row(side: str, memory: Memory, outcomes: list[Outcome]) -> list[str]:
    seconds = [one.seconds for one in outcomes]
    parts = (memory.arguments, memory.temporaries, memory.outputs - memory.aliased, memory.peak)
    return [
        side,
        *(f"{part / 1e9:.2f}" for part in parts),
        f"{median(seconds):.1f}",
        f"{min(seconds):.1f} - {max(seconds):.1f}",
        f"{median(one.host_bytes for one in outcomes) / 1e9:.2f}",
    ]
