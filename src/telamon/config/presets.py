"""The presets shipped in the package: files under `presets/KIND/NAME.yml`."""

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from telamon.config import yamlio
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
        hint = f"did you mean {near[0]!r}?" if near else _listed(kind, known)
        raise ConfigError(f"no {kind.removesuffix('s')} preset is named {name!r}; {hint}")
    return ROOT / kind / f"{name}.yml"


def _listed(kind: str, known: list[str]) -> str:
    return "see `telamon models list`" if kind == "models" else f"there are: {', '.join(known)}"


@dataclass(frozen=True)
class ModelLine:
    """A model preset in a list of them."""

    name: str
    family: str
    n_layers: int
    d_model: int
    vocab_size: int
    parameters: int
    """As the preset states them; a test holds each preset's model to this number."""
    active: int
    """Of a mixture those that work on a token; of other models all of them."""


def model_lines(part: str = "") -> list[ModelLine]:
    """The model presets whose name or family contains `part`, by family and then by size.

    Only the files are read: no model is built.

    Raises:
        ConfigError: there is none.
    """
    lines = [_model_line(name) for name in names("models")]
    found = [line for line in lines if part.lower() in line.name or part.lower() in line.family]
    if not found:
        known = {line.family for line in lines} | {line.name for line in lines}
        near = get_close_matches(part.lower(), sorted(known), 1)
        raise ConfigError(
            f"no model preset has {part!r} in its name or family; "
            + (f"did you mean {near[0]!r}?" if near else "see `telamon models list` for all")
        )
    return sorted(found, key=lambda line: (line.family, line.parameters, line.name))


def in_billions(count: int) -> str:
    """A number of parameters for people, in millions, billions or trillions, such as ``46.70B``."""
    power = min(max(len(str(count)) - 1, 0) // 3, len(_THOUSANDS) - 1)
    return f"{count / 1000**power:#.4g}{_THOUSANDS[power]}"


_THOUSANDS = ("", "k", "M", "B", "T")


def _model_line(name: str) -> ModelLine:
    values = yamlio.read(str(find("models", name)))
    sizes = {field: values[field] for field in ("family", "n_layers", "d_model", "vocab_size")}
    total = values["published_parameters"]
    return ModelLine(name, **sizes, parameters=total, active=values.get("published_active_parameters", total))


def about_model(name: str) -> str:
    """What the comment at the head of a model preset says: where its sizes are from and what to mind."""
    lines = find("models", name).read_text(encoding="utf-8").splitlines()
    return "\n".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))
