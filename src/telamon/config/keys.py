"""The dotted keys of a config: walking the schema, and finding the key somebody meant."""

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from telamon.config.schema import ModelConfig, RunConfig


@dataclass(frozen=True)
class Key:
    """One setting or section: its dotted path and what the schema says about it."""

    path: str
    field: FieldInfo
    owner: type[BaseModel]  # the class it is a field of
    section: (
        type[BaseModel] | None
    )  # the model class of a section, or of the items of a list of sections; the first where it is one of several
    many: bool  # a list of sections

    @property
    def default(self) -> Any:
        """The value when nobody sets one; ... when it must be set."""
        value = self.field.get_default(call_default_factory=True)
        return ... if value is PydanticUndefined else value

    @property
    def type(self) -> str:
        """The type as a user writes it, such as `integer > 0` or `one of split, best_fit`."""
        bounds = [f"{sign} {bound}" for item in _metadata(self.field) for sign, bound in _bounds(item)]
        return " ".join([_type_name(self.field.annotation), " and ".join(bounds)]).strip()


def walk(model: type[ModelConfig], root: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[Key]:
    """Every key of a run whose `model` section is of class `model`, sections before their settings.

    The items of a list of sections appear under `*`, such as `data.sources.*.path`. Where a section is one of several kinds,
    the settings of all kinds appear.
    """
    for name, field in root.model_fields.items():
        path = prefix + name
        sections, many = ([model], False) if field.annotation is ModelConfig else _sections(field.annotation)
        yield Key(path, field, root, sections[0] if sections else None, many)
        seen: set[str] = set()
        for section in sections:
            for key in walk(model, section, f"{path}.*." if many else f"{path}."):
                if key.path not in seen:
                    seen.add(key.path)
                    yield key


def find(model: type[ModelConfig], path: str) -> Key | None:
    """The key at a dotted path (list items by number or `*`), or None."""
    wanted = ".".join("*" if part.isdigit() else part for part in path.split("."))
    return next((key for key in walk(model) if key.path == wanted), None)


def nearest(model: type[ModelConfig], path: str) -> str | None:
    """The existing key that `path` most likely stands for, or None: a sibling first, then the same name in another section."""
    parts = path.split(".")
    general = ["*" if part.isdigit() else part for part in parts]
    everything = [key.path.split(".") for key in walk(model)]
    siblings = [other[-1] for other in everything if other[:-1] == general[:-1]]
    if close := get_close_matches(parts[-1], siblings, 1):
        return ".".join([*parts[:-1], close[0]])
    elsewhere: dict[str, str] = {}
    for other in everything:
        elsewhere.setdefault(other[-1], ".".join(other))
    close = get_close_matches(parts[-1], list(elsewhere), 1, 0.75)
    return elsewhere[close[0]] if close else None


def _sections(annotation: Any) -> tuple[list[type[BaseModel]], bool]:
    """The section classes in an annotation, and whether it is a list of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation], False
    parts = [_sections(part)[0] for part in get_args(annotation)]
    return [section for found in parts for section in found], get_origin(annotation) is tuple and any(parts)


def _type_name(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_name(args[0])
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    if origin in (Union, UnionType):
        return " or ".join(_type_name(part) for part in args)
    if origin is tuple:
        return f"list of {_type_name(args[0])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return {int: "integer", float: "number", bool: "true or false", str: "text", NoneType: "none"}.get(annotation, str(annotation))


def _metadata(field: FieldInfo) -> list[Any]:
    nested = [item for part in get_args(field.annotation) if get_origin(part) is Annotated for item in get_args(part)[1:]]
    return [*field.metadata, *(inner for item in nested for inner in getattr(item, "metadata", [item]))]


def _bounds(item: Any) -> Iterator[tuple[str, Any]]:
    for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<=")):
        bound = getattr(item, name, None)
        if bound is not None:
            yield sign, bound
