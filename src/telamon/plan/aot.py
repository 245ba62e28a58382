"""Compile a run's program for a machine that is not there, and say what it needs.

The compiler works in a child process: it may take minutes and gigabytes, and on what it cannot do it sometimes aborts. The
parent needs no JAX.
"""

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from telamon import errors
from telamon.config.hardware import Chip, chip_of_kind
from telamon.config.load import to_yaml
from telamon.config.schema import RunConfig
from telamon.plan.assigned import read_assigned
from telamon.plan.child import HOST_MEMORY, run_child
from telamon.plan.hlo import Collective
from telamon.plan.topology import Topology, compiler_environment, require_compiler

Program = Literal["train", "decode"]


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of a program. Bytes and FLOPs are those of one device, and of one run of the program.

    Where the program does not fit, the compiler stops: sizes and counts that it did not come to are 0.
    """

    argument_bytes: int
    """What goes in: weights, optimizer and batch, or weights and cache."""
    output_bytes: int
    alias_bytes: int
    """The part of the outputs that takes the place of arguments."""
    temp_bytes: int
    """Working memory: activations, gradients, what is gathered."""
    code_bytes: int
    """The program itself, where it is in the device's memory; 0 where none was generated (`quick`)."""
    host_bytes: int
    """What the program keeps in the host's memory, for one device."""
    peak_bytes: int
    """All of it together: arguments, outputs that are not in their place, working memory, code."""
    fits: bool
    """TPU: the compiler took it. GPU, whose compiler refuses nothing: the peak is at most `Chip.hbm_bytes`."""
    refusal: str | None
    """Where it does not fit: why, in the compiler's words, with the largest allocations where it lists them."""
    flops: int
    """See `telamon.plan.hlo`."""
    collectives: tuple[Collective, ...]
    kernels: tuple[tuple[str, int], ...]
    """(name, calls)."""
    attention: tuple[str, ...]
    """Which path each operation that has several takes, attention first of all, and why none before it."""
    seconds: float
    """From the start of the compiler's process to the end of the compilation."""
    host_peak_bytes: int
    """Most memory that the process had."""
    versions: Mapping[str, str]
    """Of Telamon, JAX and the compiler."""
    device_kind: str
    """As JAX names the devices."""
    device_count: int
    flags: str = ""
    """XLA's options that it was given, in a line."""
    quick: bool = False
    """The compiler was stopped before it generated code: see `telamon.plan.assigned` for what is not known then."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Compiled":
        """What :meth:`to_json` gave, also after a way through a file."""
        return cls(
            **{
                **values,
                "collectives": tuple(Collective(**collective) for collective in values["collectives"]),
                "kernels": tuple((name, calls) for name, calls in values["kernels"]),
                "attention": tuple(values["attention"]),
            }
        )


def compile_program(
    config: RunConfig,
    topology: Topology | None,
    program: Program = "train",
    *,
    batch: int | None = None,
    context: int | None = None,
    timeout: float = 1800,
    host_memory: int = HOST_MEMORY,
    save: str | Path | None = None,
    quick: bool = False,
    progress: bool = True,
) -> Compiled:
    """Compile the train step of a run, as `telamon train` would, or the decode step of its model.

    Args:
        config: the run.
        topology: the machine; none: this one, with the devices that are here.
        program: which of the two. Of train steps with several numbers of rows (a batch ramp), the one with most.
        batch: decode: texts at a time; none: as many as a training batch has rows.
        context: decode: tokens of a text that the cache has room for; none: those of a training row.
        timeout: seconds, after which the compiler is stopped.
        host_memory: bytes on this host, beyond which it is stopped.
        save: where to write the compiled train steps, for `telamon train --compiled`.
        quick: stop TPU's compiler once it has assigned memory, which saves most of the time. Nothing is then known of the code, nor
            of what is refused while it is generated, such as a Pallas kernel that needs more vector memory than there is. Where the
            compiler cannot be stopped there (GPU, CPU), and of a program that it has in its cache, all is compiled.
        progress: whether stderr gets a line that says how long it has taken so far.

    Raises:
        MissingCompiler: the compiler for these chips is not installed.
        ConfigError: the config does not fit the devices.
        CompileError: the compiler failed otherwise, or had to be stopped.
    """
    if topology is not None:
        require_compiler(topology)
    assert save is None or program == "train", "only train steps are saved"
    assert not (save and quick), "there is no code to save"
    with tempfile.TemporaryDirectory(prefix="telamon-plan-") as folder:
        request, reply, dump = Path(folder, "request.json"), Path(folder, "reply.json"), Path(folder, "dump")
        saved_config = Path(folder, "config.yaml")
        saved_config.write_text(to_yaml(config), encoding="utf-8")
        wanted = {
            "config": str(saved_config),
            "topology": None if topology is None else topology.text,
            "program": program,
            "batch": batch or config.train.batch_size,
            "context": context or config.train.seq_len,
            "save": None if save is None else str(Path(save).absolute()),
            "dump": str(dump) if quick and topology is not None and topology.chip.platform == "tpu" else None,
            "reply": str(reply),
            "parent": os.getpid(),
            "path": [os.path.abspath(place) for place in sys.path],
        }
        request.write_text(json.dumps(wanted), encoding="utf-8")
        what = f"compiling the {program} step of {config.model.preset or config.model.family} for {'this machine' if topology is None else topology.text}"
        run_child(
            ["telamon.plan.worker", str(request)],
            environment={} if topology is None else compiler_environment(topology),
            what=what,
            timeout=timeout,
            host_memory=host_memory,
            progress=progress,
        )
        return _read(reply, dump)


def too_large(peak: int, chip: Chip | None) -> str | None:
    """Why a device does not hold a program, where no compiler says it; none where it does, or where the device is not known."""
    if chip is None or peak <= chip.hbm_bytes:
        return None
    return f"it needs {peak / 2**30:.2f} GiB of the {chip.hbm_gib:.2f} GiB that a program may use of a {chip.name}"


def _read(reply: Path, dump: Path) -> Compiled:
    try:
        values = json.loads(reply.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # a temporary folder that was swept, a disk that is full
        raise errors.CompileError(f"the compiler's process ended and its answer cannot be read ({error}); run it again") from error
    if "error" in values:
        raise getattr(errors, values["error"], errors.ConfigError)(values["message"])
    if "circumstances" in values:
        figures = read_assigned(dump, values["axes"], across=values["across"])
        refusal = too_large(figures["peak_bytes"], chip_of_kind(values["circumstances"]["device_kind"]))
        return Compiled.from_json({**values["circumstances"], **figures, "fits": refusal is None, "refusal": refusal, "quick": True})
    return Compiled.from_json(values)
