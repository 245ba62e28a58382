"""The run file of a layout that a search found."""

from pathlib import Path
from typing import Any

from telamon.config import yamlio
from telamon.config.load import Loaded, load_run, to_yaml
from telamon.config.schema import RunConfig
from telamon.errors import ConfigError
from telamon.plan.layouts import chosen, in_words
from telamon.plan.search import Candidate
from telamon.plan.topology import Topology
from telamon.watch.files import check_place, write_text

_ADVICE = "choose another place, or free some space"
_LAYOUT = {"mesh": ("data", "fsdp", "expert", "tensor", "cross_slice"), "train": ("accumulate", "remat"), "optimizer": ("offload",)}


def write_run_yaml(loaded: Loaded, candidate: Candidate, topology: Topology, path: str | Path) -> None:
    """Write a run that `telamon train PATH` takes: what the user's run says, the values chosen, and what to expect as a comment.

    Where that would not be read back as the candidate's config (a run directory's file says more than a user did), every value is
    written out.

    Args:
        loaded: the run that was searched.
        candidate: one of what was found.
        topology: the machine.
        path: the file, ending in `.yml`; one that is there is replaced.

    Raises:
        ConfigError: the path has another ending, or cannot be written.
    """
    path = Path(path)
    check_run_file(path)
    head = "".join(f"# {line}\n" for line in _expectation(candidate, topology))
    write_text(path, head + yamlio.dump(_with_layout(loaded.written(), candidate.config)), advice=_ADVICE)
    if not _reads_back(path, candidate.config):
        write_text(path, head + to_yaml(candidate.config), advice=_ADVICE)


def check_run_file(path: str | Path) -> None:
    """Raise ConfigError where a run file clearly cannot be written there, before the search for what is to be in it."""
    if Path(path).suffix not in (".yml", ".yaml"):
        raise ConfigError(f"{path} would not be read as a run file; give it a name that ends in .yml")
    check_place(path, "--search")


def _with_layout(values: dict[str, Any], config: RunConfig) -> dict[str, Any]:
    values = {section: dict(value) if isinstance(value, dict) else value for section, value in values.items()}
    for section, keys in _LAYOUT.items():
        kept = {key: value for key, value in (values.get(section) or {}).items() if key not in keys}
        if layout := kept | chosen(config).get(section, {}):
            values[section] = layout
    return values


def _reads_back(path: Path, config: RunConfig) -> bool:
    try:
        return load_run(path).config == config
    except ConfigError:
        return False


def _expectation(candidate: Candidate, topology: Topology) -> list[str]:
    """What to expect of the run, in lines."""
    prediction, memory = candidate.prediction, candidate.memory
    source = "by arithmetic alone" if candidate.compiled is None else "by the compiler"
    gib = 2**30
    return [
        f"Laid out for {topology.text} ({topology.chip_count} x {topology.chip.name}) by a search: {in_words(candidate.config)}",
        f"Predicted: {prediction.tokens_per_second_per_device:,.0f} tokens/s a device, {prediction.step_seconds:.3g} s a step, "
        f"{prediction.mfu:.1%} of the peak.",
        f"Memory: {memory.total / gib:.1f} of {topology.chip.hbm_bytes / gib:.1f} GiB a device, {source}.",
    ]
