"""The whole way: settings in, a checked run config and notes out."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from telamon.config import yamlio
from telamon.config.load import load_run
from telamon.config.maxtext import run
from telamon.config.maxtext.model import model_section
from telamon.config.maxtext.settings import Note, Settings, read_settings, without_secrets


@dataclass(frozen=True)
class Converted:
    """A run, and what of it is not as it was."""

    values: dict[str, Any]
    """The run's settings that MaxText had a word for, as nested dicts."""
    notes: tuple[Note, ...]
    source: str
    """What it was made from, in words."""

    def text(self) -> str:
        """The run as a YAML file; its head lists the notes."""
        head = [f"From MaxText: {self.source}", ""]
        if self.notes:
            head += ["Not carried as it stands:", *(f"- {note}" for note in self.notes)]
        else:
            head += ["Everything was carried."]
        comments = [f"# {line}".rstrip() for line in head]
        return "\n".join(comments) + "\n\n" + yamlio.dump(_tuples(self.values))


def convert(arguments: Sequence[str], *, devices: int | None = None) -> Converted:
    """A run config that does what MaxText's settings say.

    Args:
        arguments: at most one YAML file of MaxText's, and `key=value` words on top.
        devices: how many there will be, which a batch size per device is multiplied with; none: from the mesh.

    Raises:
        ConfigError: a key or a model that is not known, or a run that cannot be.
    """
    settings = read_settings(arguments)
    values = _sections(settings, devices)
    load_run(overrides=[f"{key}={value}" for key, value in _overrides(values)])
    return Converted(values, tuple(settings.notes()), " ".join(map(without_secrets, arguments)))


def _sections(settings: Settings, stated: int | None) -> dict[str, Any]:
    model, mesh = model_section(settings), run.mesh_section(settings)
    devices = run.devices_of(settings, mesh, stated)
    sizes = _sizes(model)
    train = run.train_section(settings, devices)
    if hasattr(sizes, "router") and (experts := run.experts_section(settings, sizes.router())):
        train["experts"] = experts
    if getattr(sizes, "mtp_layers", 0):
        train["mtp_weight"] = settings["mtp_loss_scaling_factor"]
    sections = {
        "run": run.run_section(settings),
        "model": model,
        "data": run.data_section(settings, sizes.vocab_size),
        "train": train,
        "optimizer": run.optimizer_section(settings),
        "mesh": mesh,
        "eval": run.eval_section(settings, devices),
        "checkpoint": run.checkpoint_section(settings),
        "watch": run.watch_section(settings),
        "profile": run.profile_section(settings),
    }
    return {name: section for name, section in sections.items() if section}


def _sizes(section: dict[str, Any]) -> Any:
    """The model of a section, whatever the run around it."""
    return load_run(overrides=[f"{key}={value}" for key, value in _overrides({"model": section})]).config.model


def _overrides(values: dict[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as `key=value` pairs, whose values are YAML."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _overrides(value, f"{path}{key}.")
        else:
            yield path + key, json.dumps(value)


def _tuples(value: Any) -> Any:
    """Lists as the tuples that the dumper writes."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
