"""Going on with a run: its saved config, with what may still be changed."""

from collections.abc import Sequence
from pathlib import Path

from telamon.config.explain import difference
from telamon.config.load import Loaded, hint_at_run, load_run
from telamon.errors import ConfigError

# What the saved weights and optimizer state are made for, and where the run lives. (Data that changed are the loader's to refuse.)
_KEPT = ("model.", "optimizer.kind", "optimizer.groups", "run.root", "run.name")


def load_resumed(path: str, overrides: Sequence[str] = (), *, imports: Sequence[str] = ()) -> Loaded:
    """The config of a run directory or URL, changed by `overrides`.

    Raises ConfigError where there is none, or for a change that the run's weights and optimizer state cannot follow;
    the message shows both values and where each came from.
    """
    file = f"{path.rstrip('/')}/config.yaml"
    if "://" not in path and not Path(file).is_file():
        hint = hint_at_run(path) or "name a run's folder, such as resume=runs/first"
        raise ConfigError(f"resume={path}: no run there (no config.yaml); {hint}")
    saved = load_run(file, imports=imports)
    now = load_run(file, overrides, imports=imports)
    for key, _, _ in difference(saved.config, now.config):
        if key.startswith(_KEPT):
            raise ConfigError(f"{key} stays as it is in a resumed run: {now.origin(key)}; leave it out, or start a new run")
    return now
