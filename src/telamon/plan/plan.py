"""The plan of a run on a machine that need not be there: what fits, what moves, and what a step should take."""

import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from telamon.config.hardware import chip_of_kind
from telamon.config.load import plain
from telamon.config.schema import RunConfig
from telamon.errors import ConfigError, MissingCompiler
from telamon.parallel.mesh import check_slices
from telamon.plan.aot import Compiled, compile_program
from telamon.plan.cost import Prediction, predict
from telamon.plan.memory import Memory, estimate_decode_memory, estimate_memory, split_compiled
from telamon.plan.price import Price, price_of
from telamon.plan.topology import Topology, missing_compiler
from telamon.train.job import check_paths
from telamon.watch.files import check_place


@dataclass(frozen=True)
class Program:
    """One program of a run on a device of the topology."""

    name: Literal["train", "decode"]
    what: str
    """The same in words."""
    memory: Memory
    """The compiler's figures where it was asked, else arithmetic alone."""
    estimate: Memory
    """By arithmetic."""
    compiled: Compiled | None
    """What the compiler made of it; none: it was not asked."""
    limit: int | None
    """Bytes that a program may use of a device's memory; none: not known, for devices that are in no table."""

    @property
    def fits(self) -> bool:
        """Whether a device holds it: the compiler's word where there is one."""
        if self.compiled is not None:
            return self.compiled.fits
        return self.limit is None or self.memory.total <= self.limit


@dataclass(frozen=True)
class Decoding:
    """The batch whose decoding step is planned."""

    batch: int
    """Rows generated at a time, over all devices."""
    length: int
    """Tokens of a row at most."""

    @classmethod
    def parse(cls, text: str) -> "Decoding":
        """From text like ``32x8192``. Raises ConfigError for anything else."""
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text.strip())
        if match is None:
            raise ConfigError(f"{text!r} is not a batch to decode (--decode); write rows x tokens, such as 32x8192")
        return cls(int(match[1]), int(match[2]))


@dataclass(frozen=True)
class Request:
    """What is asked of a plan beside the run and the machine."""

    programs: tuple[Literal["train", "decode"], ...] = ("train", "decode")
    compile: bool = True
    """Ask the compiler; otherwise arithmetic alone."""
    decoding: Decoding | None = None
    """None: rows and tokens as in a step of the run."""
    quick: bool = False
    """Stop TPU's compiler once it has assigned memory; see `compile_program`."""
    timeout: float = 600.0
    """Seconds that a compilation may take."""
    host_memory: float = 20.0
    """GiB that a compilation may take of this host."""
    save: Path | None = None
    """Where to keep the compiled train step."""
    chip_hour: float | None = None
    """Price of a chip for an hour, in dollars."""


@dataclass(frozen=True)
class Plan:
    """Everything that `telamon plan` says."""

    config: RunConfig
    topology: Topology | None
    """None: this machine."""
    programs: tuple[Program, ...]
    prediction: Prediction | None
    """Of the training step; none: it is not planned, or the devices are not known."""
    price: Price | None
    saved: Path | None
    not_compiled: str | None = None
    """What to install for the compiler to be asked, where it was to be asked and is missing: all is then arithmetic."""

    @property
    def fits(self) -> bool:
        """Whether each program does."""
        return all(program.fits for program in self.programs)

    @property
    def device_count(self) -> int:
        """JAX devices in all."""
        if self.topology is not None:
            return self.topology.device_count
        return next(program.compiled.device_count for program in self.programs if program.compiled is not None)

    def as_json(self) -> dict[str, Any]:
        """All of it, for programs; bytes are a device's."""
        return {
            "config": plain(self.config),
            "topology": "here" if self.topology is None else self.topology.text,
            "fits": self.fits,
            "not_compiled": self.not_compiled,
            "programs": [asdict(program) | {"fits": program.fits, "total": program.memory.total} for program in self.programs],
            "prediction": None if self.prediction is None else asdict(self.prediction),
            "price": None if self.price is None else asdict(self.price),
        }


def make_plan(config: RunConfig, topology: Topology | None, request: Request, *, progress: bool = True) -> Plan:
    """Plan a run. Where the compiler for its chips is missing, the answer is by arithmetic, and says so.

    Args:
        config: the run.
        topology: the machine; none: this one, whose devices are asked for their number only by the compiler.
        request: what to find out.
        progress: show a line about a compilation that is under way.

    Raises:
        ConfigError: the run does not fit the machine, or the file to save cannot be written.
        MissingCompiler: a program is to be saved, and the compiler for these chips is not installed.
        CompileError: a compilation failed, or took longer or more memory than it may.
    """
    assert topology is not None or request.compile, "arithmetic needs to know the machine"
    assert request.save is None or (request.compile and "train" in request.programs), "there is nothing to save"
    if request.save is not None:
        check_place(request.save, "--save")
    not_compiled = None
    if topology is not None:
        _check_machine(config, topology)
        not_compiled = missing_compiler(topology) if request.compile else None
    if not_compiled is not None:
        if request.save is not None:
            raise MissingCompiler(f"--save {request.save}: {not_compiled}")
        request = replace(request, compile=False)
    programs = tuple(_program(name, config, topology, request, progress) for name in request.programs)
    prediction = None if topology is None or "train" not in request.programs else predict(config, topology)
    price = None
    if prediction is not None and topology is not None and request.chip_hour is not None:
        price = price_of(config, topology, prediction, chip_hour=request.chip_hour)
    return Plan(config, topology, programs, prediction, price, request.save, not_compiled)


def _check_machine(config: RunConfig, topology: Topology) -> None:
    """Find at once what would be refused once the program is traced, and what arithmetic does not look at."""
    platform, slices = topology.chip.platform, topology.slices
    check_slices(config.mesh, slices, f"{topology.text} has {slices}", platform=platform)
    check_paths(config, platform)


def _program(name: Literal["train", "decode"], config: RunConfig, topology: Topology | None, request: Request, progress: bool) -> Program:
    batch = request.decoding or Decoding(config.train.batch_size, config.train.seq_len)
    options: dict[str, Any] = {"save": request.save} if name == "train" else {"batch": batch.batch, "context": batch.length}
    compiled = None
    if request.compile:
        bounds = {"quick": request.quick, "timeout": request.timeout, "host_memory": int(request.host_memory * 2**30), "progress": progress}
        compiled = compile_program(config, topology, name, **options, **bounds)
    if topology is not None:
        devices, limit = topology, topology.chip.hbm_bytes
    else:
        assert compiled is not None
        chip = chip_of_kind(compiled.device_kind)
        devices, limit = compiled.device_count, None if chip is None else chip.hbm_bytes
    if name == "train":
        estimate, what = estimate_memory(config, devices), "training step"
    else:
        estimate = estimate_decode_memory(config, devices, batch=batch.batch, length=batch.length)
        what = f"decoding step for {batch.batch} rows of {batch.length} tokens"
    memory = split_compiled(compiled, estimate, decoding=name == "decode") if compiled is not None and compiled.fits else estimate
    return Program(name, what, memory, estimate, compiled, limit)
