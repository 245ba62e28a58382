"""What pydantic found wrong with a config, said in one line to the person who wrote it."""

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from telamon.config import keys
from telamon.config.schema import ModelConfig
from telamon.errors import ConfigError

_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list, such as [a, b]",
    "dict_type": "a mapping",
    "model_type": "a section with keys of its own",
    "plain_type": "true or false, a number, or text",
}

_PLAIN = ("bool", "int", "float", "str")
"""What pydantic adds to the path of a value that may be any of these, one error for each."""


def show(value: Any) -> str:
    """A value as it is shown to the user: one line, not too long, lists and none as they are written in YAML."""
    text = _written(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _written(value: Any) -> str:
    match value:
        case None | "none":
            return "none"
        case bool():
            return str(value).lower()
        case tuple() | list():
            return f"[{', '.join(map(_written, value))}]"
        case dict():
            return f"{{{', '.join(f'{key}: {_written(item)}' for key, item in value.items())}}}"
        case _:
            return repr(value)


def line(text: str) -> str:
    """A user's own words on one line."""
    return text if text.isprintable() and len(text) <= 80 else show(text)


def refuse(errors: list[dict[str, Any]], model: type[ModelConfig], where: Callable[[str], str]) -> ConfigError:
    """A ConfigError for pydantic's `errors`: the first in full, the others counted.

    `model` is the class of the model section; `where` gives the place a key was set, such as "in tiny.yml".
    """
    errors = _plain_values_once(errors)
    # A list with a wrong item is also reported as too short: that says nothing more.
    errors = [error for error in errors if not any(_within(other["loc"], error["loc"]) for other in errors)]
    message = _line(errors[0], model, where)
    if len(errors) > 1:
        others = ", ".join(_path(error) or "a combination" for error in errors[1:4])
        message += f"\nand {len(errors) - 1} more: {others}{', ...' if len(errors) > 4 else ''}"
    return ConfigError(message)


def _plain_values_once(errors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With one error instead of four for a value that is nothing plain."""
    once = [
        {**error, "type": "plain_type", "loc": error["loc"][:-1]}
        for error in errors
        if error["loc"][-1:] == _PLAIN[:1] and error["type"].startswith("bool_")
    ]
    plain = {(*error["loc"], name) for error in once for name in _PLAIN}
    return [error for error in errors if error["loc"] not in plain] + once


def _within(inner: tuple[Any, ...], outer: tuple[Any, ...]) -> bool:
    return len(inner) > len(outer) and inner[: len(outer)] == outer


def _path(error: dict[str, Any]) -> str:
    """The dotted path; a part that cannot be printed as it is (a line break in a key) is escaped."""
    return ".".join(line(str(part)) for part in error["loc"])


def _line(error: dict[str, Any], model: type[ModelConfig], where: Callable[[str], str]) -> str:
    path, kind, value, context = _path(error), error["type"], error.get("input"), error.get("ctx") or {}
    place = where(path)
    setting = f"{path}={show(value)}" + (f" ({place})" if place else "")
    if kind == "extra_forbidden":
        near = keys.nearest(model, path)
        section = path.rpartition(".")[0]
        hint = f"did you mean {near}?" if near else f"see `telamon config explain{' ' + section if section else ''}`"
        return f"unknown key {path}" + (f" ({place})" if place else "") + f"; {hint}"
    if kind == "missing":
        return f"{path} must be given"
    if kind == "value_error":  # a check of our own, which names its fields itself
        reason = str(context.get("error", error["msg"]))
        return reason if path in reason else f"{path}: {reason}"
    if kind == "literal_error":
        near = get_close_matches(str(value), _allowed(context), 1)
        return f"{setting} must be one of {context['expected']}" + (f"; did you mean '{near[0]}'?" if near else "")
    if kind == "too_short":
        least = context["min_length"]
        return f"{setting} must hold at least {least} item{'s' if least > 1 else ''}"
    if kind == "string_pattern_mismatch":  # a regular expression explains nothing; the description does
        described = keys.find(model, path)
        return f"{setting} does not fit" + (f": {described.field.description}" if described else "")
    if kind in _EXPECTED:
        quoted = f"; as text it is {path}='\"{show(value)}\"'" if kind == "string_type" and isinstance(value, int | float) else ""
        return f"{setting} must be {_EXPECTED[kind]}, not {_type(value)}{quoted}"
    return f"{setting}: {error['msg'].replace('Input should', 'it must')}"


def _allowed(context: dict[str, Any]) -> list[str]:
    return [part.strip(" '") for part in str(context["expected"]).replace(" or ", ",").split(",")]


def _type(value: Any) -> str:
    names = {
        type(None): "none",
        bool: "true/false",
        int: "an integer",
        float: "a fraction",
        str: "text",
        tuple: "a list",
        dict: "a section",
    }
    return names.get(type(value), type(value).__name__)
