"""The presets shipped in the package: files under `presets/KIND/NAME.yml`."""

from difflib import get_close_matches
from pathlib import Path

from telamon.errors import ConfigError

ROOT = Path(__file__).parents[1] / "presets"


def names(kind: str) -> list[str]:
    """Names of the presets of a kind: `models`, `runs` or `hardware`."""
    return sorted(path.stem for path in (ROOT / kind).glob("*.yml"))


def find(kind: str, name: str) -> Path:
    """The file of a preset. Raises ConfigError with the nearest name."""
    known = names(kind)
    if name not in known:
        near = get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"
        raise ConfigError(f"no {kind.removesuffix('s')} preset is named {name!r}; {hint}")
    return ROOT / kind / f"{name}.yml"
