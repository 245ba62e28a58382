"""The compiling of a training step for machines that are not there, as whole commands: MaxText's `train_compile` and `telamon plan`."""

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

from benchmarks.peers import MAXTEXT, python_of, versions_of
from benchmarks.processes import PAUSE, BenchmarkError, Finished, Program, finish
from benchmarks.results import versions_here
from telamon.plan.topology import parse_topology

TIMEOUT = 1800.0
"""Seconds that a command may take."""
RUN = "benchmarks/runs/ahead.yml"
MODULE = "maxtext.trainers.pre_train.train_compile"
CHIPLESS = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
"""For both sides: no device, and no machine to ask for one."""
LONGEST = 240
"""Letters of a compiler's message that a table takes, a third from its start and the rest from its end."""
OUT_OF_MEMORY = (r"required for (HLO temporaries) \((\S+)\) exceeds available HBM \((\S+)\)", r"Used (\S+) of (\S+) hbm")
"""How compilers for TPUs say what they wanted and, last, what there is."""
THREADS = f"each side has the machine's {len(os.sched_getaffinity(0))} cores to itself during its turn"
NOTES = (
    "Each side is its whole command, from its start to its end, with no cache of compiled programs. Memory of this host is what the command "
    f"and all its children hold at one time, looked at every {PAUSE} s.",
    "Memory of a device is the compiler's own analysis of the program, as each side prints it: the peak is arguments + temporaries + outputs "
    "that do not lie where arguments were.",
)


COMPILERS = ("jax", "jaxlib", "libtpu", "tokamax", "flax", "optax")


@dataclass(frozen=True)
class Work:
    """A training step to compile, with full recomputation and everything split over all devices."""

    model: str
    """MaxText's name."""
    machine: str
    """The cloud's name, which both sides know: v6e-256 has 256 chips, v5p-512 has 256 of two cores each."""
    seq_len: int
    rows: int
    """Rows on each device."""
    preset: str | None = None
    """Ours, where it has another name."""
    mesh: tuple[str, ...] = ()
    """Our mesh, where `fsdp` over all devices does not divide the model."""

    @property
    def maxtext(self) -> list[str]:
        """What of MaxText's command belongs to this work."""
        return [
            f"model_name={self.model}",
            f"compile_topology={self.machine}",
            f"max_target_length={self.seq_len}",
            f"per_device_batch_size={self.rows}",
            *COMMON,
        ]

    @property
    def telamon(self) -> list[str]:
        """The arguments of `telamon`."""
        rows = self.rows * parse_topology(self.machine).device_count
        sizes = [f"model.preset={self.preset or self.model}", f"train.seq_len={self.seq_len}", f"train.batch_size={rows}", *self.mesh]
        return ["plan", RUN, *sizes, "--on", self.machine, "--only", "train", "--json", "--timeout", f"{TIMEOUT:.0f}"]


COMMON = (
    "compile_topology_num_slices=1",
    "remat_policy=full",
    "ici_fsdp_parallelism=-1",
    "opt_type=adamw",
    "dtype=bfloat16",
    "weight_dtype=float32",
    "dataset_type=synthetic",
    "enable_checkpointing=false",
    "jax_cache_dir=",
    "run_name=bench",
    "base_output_directory=OUT",
    "steps=1000",
)


@dataclass(frozen=True)
class Memory:
    """What the compiled step takes of a device, in bytes."""

    arguments: int
    temporaries: int
    outputs: int
    aliased: int
    """Bytes of the outputs that lie where arguments were."""

    @property
    def peak(self) -> int:
        """Arguments, temporaries, and outputs of their own."""
        return self.arguments + self.temporaries + self.outputs - self.aliased


@dataclass(frozen=True)
class Outcome:
    """What a command made of a work."""

    seconds: float
    host_bytes: int
    """Highest memory of the command and its children on this machine."""
    memory: Memory | None
    """None: there is no program."""
    refusal: str | None = None
    """Why there is none, in a line."""


@dataclass(frozen=True)
class Turns:
    """Both sides' outcomes, one a round."""

    telamon: list[Outcome] = field(default_factory=list)
    maxtext: list[Outcome] = field(default_factory=list)
    quick: list[Outcome] = field(default_factory=list)
    """Ours without the generation of code, where it was asked for."""


def turns(work: Work, rounds: int, *, quick: bool = False) -> Turns:
    """Both commands in turns; who begins a round changes from round to round.

    Args:
        work: what is compiled.
        rounds: turns of each side.
        quick: ours with `--quick` as well, as a third side.
    """
    taken = Turns()
    sides: list[Any] = [("MaxText", compile_with_maxtext, taken.maxtext), ("Telamon", compile_with_telamon, taken.telamon)]
    sides += [("Telamon --quick", partial(compile_with_telamon, quick=True), taken.quick)] * quick
    for number in range(rounds):
        for name, compile_work, outcomes in sides if number % 2 else sides[::-1]:
            outcomes.append(compile_work(work))
            print(f"  {work.model} {number + 1}/{rounds}  {name}: {describe(outcomes[-1])}", flush=True)
    return taken


def describe(outcome: Outcome) -> str:
    """An outcome in a line."""
    made = outcome.refusal if outcome.memory is None else f"peak {outcome.memory.peak / 1e9:.2f} GB a device"
    return f"{outcome.seconds:.1f} s, {outcome.host_bytes / 1e9:.1f} GB of this host; {made}"


def compile_with_maxtext(work: Work) -> Outcome:
    """MaxText's whole command."""
    program = Program("MaxText", [python_of(MAXTEXT), "-m", MODULE, *work.maxtext], "", _environment({"DECOUPLE_GCLOUD": "TRUE"}))
    done = finish(program, TIMEOUT)
    if done.code:
        refusal = refusal_in(done.complaints)
        if refusal is None:
            _unexplained(program, done)
        return Outcome(done.seconds, done.peak_bytes, None, refusal)
    return Outcome(done.seconds, done.peak_bytes, maxtext_memory(done.output))


def compile_with_telamon(work: Work, *, quick: bool = False) -> Outcome:
    """Our whole command."""
    words = [*work.telamon, *(["--quick"] if quick else [])]
    program = Program("Telamon", [sys.executable, "-m", "telamon", *words], "", _environment({}))
    done = finish(program, TIMEOUT)
    try:
        memory, refusal = telamon_memory(json.loads(done.output))
    except (ValueError, KeyError, IndexError, TypeError):
        _unexplained(program, done)
    return Outcome(done.seconds, done.peak_bytes, memory, refusal)


def maxtext_memory(output: str) -> Memory:
    """The compiler's memory analysis as MaxText prints it. Raises BenchmarkError where there is none."""
    line = re.search(r"^Memory analysis: .*$", output, re.MULTILINE)
    sizes = {name: int(value) for name, value in re.findall(r"(\w+)_size_in_bytes=(\d+)", line[0])} if line else {}
    try:
        return Memory(sizes["argument"], sizes["temp"], sizes["output"], sizes["alias"])
    except KeyError as error:
        raise BenchmarkError(f"MaxText printed no memory analysis with {error}:\n{output[-2000:]}") from None


def telamon_memory(plan: Mapping[str, Any]) -> tuple[Memory | None, str | None]:
    """The same out of a plan's JSON, or the compiler's refusal in a line."""
    compiled = plan["programs"][0]["compiled"]
    if compiled["refusal"] is not None:
        return None, _line(compiled["refusal"])
    return Memory(*(compiled[f"{name}_bytes"] for name in ("argument", "temp", "output", "alias"))), None


def refusal_in(complaints: str) -> str | None:
    """The message of the exception that ended a Python program, in a line; none: there was no exception.

    Of a compiler that ran out of memory, only how much it wanted and how much there is.
    """
    _, found, trace = complaints.rpartition("Traceback (most recent call last):")
    raised = re.search(r"^[\w.]+(?:Error|Exception|Exit)\b.*", trace, re.MULTILINE | re.DOTALL) if found else None
    return _line(raised[0]) if raised else None


def versions() -> dict[str, dict[str, str]]:
    """Each side's packages."""
    return {"Telamon": versions_here(*COMPILERS), "MaxText": versions_of(replace(MAXTEXT, reported=("maxtext", *COMPILERS)))}


def shown(work: Work) -> dict[str, str]:
    """Each side's command as a person would type it."""
    variables = " ".join(f"{name}={value}" for name, value in {**CHIPLESS, "DECOUPLE_GCLOUD": "TRUE"}.items())
    return {
        "Telamon": f"telamon {shlex.join(work.telamon)}",
        "MaxText": f"{variables} python -m {MODULE} {shlex.join(work.maxtext)}",
    }


def _line(message: str) -> str:
    for pattern in OUT_OF_MEMORY:
        if found := re.search(pattern, message):
            return f"does not fit: {' '.join(found.groups()[:-1])} of {found[found.lastindex or 0]}"
    # After the first paragraph comes advice; before the error's name, its module.
    paragraph = re.split(r"\n\s*\n|This error occurs at source", message.strip(), maxsplit=1)[0]
    line = re.sub(r"^(\w+\.)+", "", " ".join(paragraph.split())).replace("|", "/")
    return line if len(line) <= LONGEST else f"{line[: LONGEST // 3 - 3]} … {line[-LONGEST * 2 // 3 :]}"


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    # Two programs on one host may both load the TPU's compiler where there is no TPU that they would fight for.
    return {**CHIPLESS, "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_ENABLE_COMPILATION_CACHE": "false", **own}


def _unexplained(program: Program, done: Finished) -> NoReturn:
    tail = (done.output + done.complaints)[-2000:]
    raise BenchmarkError(f"{program.name} ended with exit code {done.code}: {' '.join(program.command)}\n{tail}")
