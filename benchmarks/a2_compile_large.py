"""A2: training steps of six models compiled for 128 or 256 chips that are not there: whether they fit, and memory of a device."""

from collections.abc import Collection, Mapping
from statistics import median

from benchmarks import ahead
from benchmarks.ahead import Memory, Outcome, Turns, Work
from benchmarks.peers import MAXTEXT, python_of
from benchmarks.results import Result

ROUNDS = 1
WORKS = (
    Work("llama3.1-8b", "v6e-256", seq_len=8192, rows=4),
    Work("llama3.1-70b", "v6e-256", seq_len=8192, rows=2),
    Work("mixtral-8x7b", "v5p-256", seq_len=4096, rows=4),
    Work("qwen3-235b-a22b", "v6e-256", seq_len=4096, rows=2),
    Work("gpt-oss-120b", "v6e-256", seq_len=4096, rows=2, mesh=("mesh.fsdp=64", "mesh.expert=4")),
    Work("deepseek3-671b", "v5p-512", seq_len=4096, rows=2, preset="deepseek-v3-671b"),
)
CHOICES = tuple(work.model for work in WORKS)
PEAK = 0.9


def run(rounds: int, chosen: Collection[str] = CHOICES) -> Result:
    """Each model in turns."""
    python_of(MAXTEXT)
    return result({work: ahead.turns(work, rounds) for work in WORKS if work.model in chosen})


def result(taken: Mapping[Work, Turns]) -> Result:
    """What the turns show."""
    ratios = {work.model: ratio for work, turns in taken.items() if (ratio := peak_ratio(turns)) is not None}
    fitting = [work.model for work, turns in taken.items() if turns.telamon[0].memory is not None]
    largest = max(ratios.values(), default=None)
    return Result(
        id="A2",
        title="training steps of six models compiled for 128 or 256 chips on a host without any, against MaxText",
        columns=(
            "model",
            "machine",
            "T, rows",
            "side",
            "arguments + temporaries of a device",
            "peak of MaxText's",
            "command s",
            "this host's GB",
        ),
        rows=[line for work, turns in taken.items() for line in _lines(work, turns)],
        figures={
            "models": float(len(taken)),
            "fit": float(len(fitting)),
            "largest share of MaxText's peak": largest and round(largest, 3),
            **{f"peak of MaxText's: {model}": round(ratio, 3) for model, ratio in ratios.items()},
        },
        target=f"all six fit, with a peak of at most {PEAK} × MaxText's wherever that fits",
        holds=len(fitting) == len(WORKS) and largest is not None and largest <= PEAK,
        commands=ahead.shown(WORKS[0]),
        versions=ahead.versions(),
        threads=ahead.THREADS,
        notes=[
            "Full recomputation, pure FSDP, AdamW, weights and moments in float32, bfloat16 activations; nothing else is chosen for a model. The "
            f"commands below are {WORKS[0].model}'s; the others differ in name, machine, length, and rows.",
            "256 devices divide nothing of gpt-oss-120b, whose width is 2880 and which has 128 experts: MaxText refuses it. Ours is laid out as near "
            "to pure FSDP as it can be, mesh.fsdp=64 mesh.expert=4: 64 divides the width, and 4 the experts.",
            "v6e-256 is 256 chips, v5p-256 is 128 and v5p-512 is 256; each is one device.",
            *ahead.NOTES,
            f"Rounds for each model: {min(len(turns.maxtext) for turns in taken.values())}, the sides in turns. Memory of a device does not change from "
            "one to the next; times are medians, of a single run where there is one round.",
        ],
    )


def peak_ratio(turns: Turns) -> float | None:
    """Our peak over MaxText's; None where a side has no program."""
    ours, theirs = turns.telamon[0].memory, turns.maxtext[0].memory
    return ours.peak / theirs.peak if ours and theirs else None


def _lines(work: Work, turns: Turns) -> list[list[str]]:
    ratio = peak_ratio(turns)
    about = [work.model, work.machine, f"{work.seq_len}, {work.rows}"]
    return [
        [*about, "Telamon", *_cells(turns.telamon, "" if ratio is None else f"{ratio:.2f}")],
        ["", "", "", "MaxText", *_cells(turns.maxtext, "")],
    ]


def _cells(outcomes: list[Outcome], ratio: str) -> list[str]:
    memory = outcomes[0].memory
    made = outcomes[0].refusal if memory is None else _sizes(memory)
    return [
        made or "",
        ratio,
        f"{median(one.seconds for one in outcomes):.1f}",
        f"{median(one.host_bytes for one in outcomes) / 1e9:.2f}",
    ]


def _sizes(memory: Memory) -> str:
    return f"{memory.arguments / 1e9:.2f} + {memory.temporaries / 1e9:.2f} GB; peak {memory.peak / 1e9:.2f}"
