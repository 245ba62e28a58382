"""Which layout of a run is the fastest that fits a machine.

Every layout that the config allows is written down (`plan.layouts`). Those that do not divide are dropped, then those that
need more memory than a device has, both by arithmetic; the rest are ranked by predicted speed, and the best few are compiled
where a compiler is given: what it refuses is dropped too, and what it says takes the estimate's place.

What waits in the host's memory may take as much of it, for each device, as the device has itself: every host that such chips
are sold with has that.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from telamon.config.schema import RunConfig
from telamon.errors import ConfigError
from telamon.plan.aot import Compiled
from telamon.plan.cost import Prediction, predict
from telamon.plan.layouts import Layouts, in_words
from telamon.plan.memory import PARTS, Memory, estimate_memory, split_compiled
from telamon.plan.topology import Topology

MARGIN = 0.05
"""Share of a device's memory that an estimate is to leave free: it may be wrong, and an allocator cannot use every byte."""

_LARGE, _REFUSED = "needs more memory than a device has", "refused by the compiler"

_NAMED = 3
"""Parts of the memory that a refusal names."""


@dataclass(frozen=True)
class Candidate:
    """A layout that fits."""

    config: RunConfig
    """The run with this layout."""
    memory: Memory
    """Bytes a device: the compiler's where it was compiled, else estimated."""
    prediction: Prediction
    compiled: Compiled | None = None


@dataclass(frozen=True)
class Found:
    """What a search found."""

    candidates: tuple[Candidate, ...]
    """The best first."""
    considered: int
    """Layouts in all."""
    dropped: Mapping[str, int]
    """For each reason, how many; of a mixture, whose memory takes longer to find, those among the fastest that were looked at."""


def search(
    config: RunConfig,
    topology: Topology,
    *,
    free_batch: bool = False,
    keep: int = 10,
    compile_best: int = 0,
    compiler: Callable[[RunConfig, Topology], Compiled] | None = None,
) -> Found:
    """The layouts of a run that fit a machine, the fastest first by prediction.

    Args:
        config: the run; its own mesh, recomputation, microbatches and offloading are not looked at.
        topology: the machine.
        free_batch: choose `train.batch_size` too, as rows a device; else the run's stays.
        keep: how many are given back.
        compile_best: how many of these the compiler is to have accepted, from the first on.
        compiler: such as `plan.aot.compile_program`.

    Raises:
        ConfigError: nothing divides, or nothing fits; the message says how much is missing and what would help.
    """
    layouts = Layouts(config, topology, free_batch)
    sized = [(laid, estimate_memory(laid, topology, at_least=True)) for laid in layouts]
    if not sized:
        reasons = "; ".join(layouts.examples.values())
        raise ConfigError(f"no layout of this run divides over the {topology.device_count} devices of {topology.text}: {reasons}")
    dropped = Counter(layouts.dropped)
    considered = len(sized) + dropped.total()
    limit = round(topology.chip.hbm_bytes * (1 - MARGIN))
    near = [(laid, memory) for laid, memory in sized if memory.host <= topology.chip.hbm_bytes]
    fitting = [(laid, memory) for laid, memory in near if memory.total <= limit]
    if not fitting:
        raise ConfigError(_too_large(near or sized, topology, limit))
    dropped["needs more of the host's memory than there may be"] += len(sized) - len(near)
    dropped[_LARGE] += len(near) - len(fitting)
    ranked = sorted((Candidate(laid, memory, predict(laid, topology)) for laid, memory in fitting), key=_rank)
    found = _whole(ranked, topology, limit, dropped)
    if compiler is not None and compile_best:
        found = _accepted(found, topology, compile_best, compiler, dropped)
    candidates = tuple(itertools.islice(found, keep))
    if not candidates and not dropped[_REFUSED]:
        whole = [(candidate.config, estimate_memory(candidate.config, topology)) for candidate in ranked]
        raise ConfigError(_too_large(whole, topology, limit))
    return Found(candidates, considered, +dropped)


def _whole(ranked: Iterable[Candidate], topology: Topology, limit: int, dropped: Counter[str]) -> Iterator[Candidate]:
    """Those that fit with what experts take at work as well; how much that is takes a while to find, and is found for as many as are wanted."""
    for candidate in ranked:
        memory = estimate_memory(candidate.config, topology)
        if memory.total <= limit:
            yield replace(candidate, memory=memory)
        else:
            dropped[_LARGE] += 1


def _accepted(
    ranked: Iterable[Candidate],
    topology: Topology,
    wanted: int,
    compiler: Callable[[RunConfig, Topology], Compiled],
    dropped: Counter[str],
) -> Iterator[Candidate]:
    """The candidates, of which the first `wanted` are compiled; what the compiler refuses is left out."""
    for candidate in ranked:
        if wanted == 0:
            yield candidate
            continue
        compiled = compiler(candidate.config, topology)
        if compiled.fits:
            wanted -= 1
            yield replace(candidate, memory=split_compiled(compiled, candidate.memory), compiled=compiled)
        else:
            dropped[_REFUSED] += 1


def _rank(candidate: Candidate) -> tuple[float, int, int]:
    """By predicted speed; where that is the same, what has less in the host's memory comes first, then what needs less memory."""
    return -candidate.prediction.tokens_per_second_per_device, _offloaded(candidate.config), candidate.memory.total


def _offloaded(config: RunConfig) -> int:
    """How much waits in the host's memory: moments, then activations."""
    return (config.train.remat == "offload") + 2 * config.optimizer.offload


def _too_large(sized: Sequence[tuple[RunConfig, Memory]], topology: Topology, limit: int) -> str:
    laid, memory = min(sized, key=lambda pair: pair[1].total)
    parts = sorted(PARTS, key=lambda part: -getattr(memory, part))[:_NAMED]
    largest = ", ".join(f"{part} {_gib(getattr(memory, part))}" for part in parts)
    return (
        f"no layout of this run fits {topology.text}, whose devices have {_gib(topology.chip.hbm_bytes)} each, {MARGIN:.0%} of it kept free. "
        f"The nearest ({in_words(laid)}) needs {_gib(memory.total)}, {_gib(memory.total - limit)} too much: {largest}. "
        f"What would help: {'; '.join(_ways_out(laid, memory, topology, limit))}"
    )


def _ways_out(laid: RunConfig, memory: Memory, topology: Topology, limit: int) -> Iterator[str]:
    """What a search has not tried."""
    how, settings = laid.train, laid.optimizer
    yield f"more devices, about {-(-memory.total * topology.device_count // limit)}"
    if settings.kind == "adamw":
        yield "optimizer.kind=muon, which keeps one moment of a matrix instead of two"
    if memory.activations + memory.temporaries > memory.total // 2:
        yield f"a shorter train.seq_len (now {how.seq_len})"
        yield f"a smaller train.loss_chunk (now {how.loss_chunk})"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
