"""Chat templates in Jinja, rendered as Hugging Face renders them (transformers, `utils/chat_template_utils.py`).

transformers itself would do, at 1.6 s to import and 109 MB to install; what it sets up in Jinja is little, and recorded renderings of its own
hold this to the same text.

Rendered text is *marked*: characters that no text may hold (Unicode's noncharacters, which are for a program's own use) say what came from
where. `unmarked` takes them out again.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from telamon.config.schema import TokenizerConfig
from telamon.data.tokenizer import declared_specials
from telamon.errors import ConfigError, DataError

Message = Mapping[str, Any]
"""A turn: `role`, `content`, and whatever else the template reads."""

SPECIAL, LETTERS, OPEN, CLOSE = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"
"""Marks: before a special token of the template; behind each letter of one that a message spells; around a `{% generation %}` block."""

FILE, FOLDER, CONFIG, DEFAULT = "chat_template.jinja", "additional_chat_templates", "tokenizer_config.json", "default"
_MARKS = str.maketrans("", "", SPECIAL + LETTERS + OPEN + CLOSE)


def unmarked(text: str) -> str:
    """A text without its marks."""
    return text.translate(_MARKS)


@dataclass(frozen=True)
class ChatTemplate:
    """A model's template, or several by name (`default`, and `tool_use` for conversations with tools)."""

    sources: Mapping[str, str]
    tokens: Mapping[str, str]
    """What a template may call `bos_token`, `eos_token` and so on."""
    origin: str
    """Where it was read, for messages."""

    @cached_property
    def hash(self) -> str:
        """Of the text, as `sha256sum` gives it for the file; of several, of all together."""
        single = self.sources.get(DEFAULT) if len(self.sources) == 1 else None
        return hashlib.sha256((json.dumps(dict(self.sources), sort_keys=True) if single is None else single).encode()).hexdigest()

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: the turns in order.
            tools: JSON schemas; their keys keep their order.
            add_generation_prompt: end with the header that opens an assistant turn.
            variables: what else the template reads, such as `enable_thinking`.

        Raises:
            DataError: the template refuses the conversation, or fails on it; the message is the template's.
        """
        return unmarked(self.render_marked(messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables))

    def render_marked(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """As `render`, with the marks around `{% generation %}` blocks and whatever marks the messages have."""
        import jinja2

        name = "tool_use" if tools is not None and "tool_use" in self.sources else DEFAULT
        given = {**self.tokens, "documents": None, **variables}
        try:
            return self._compiled[name].render(messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **given)
        except jinja2.TemplateError as error:
            raise DataError(f"{self.origin} cannot render this conversation: {error.message}") from error
        except (TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise DataError(f"{self.origin} cannot render this conversation: {type(error).__name__}: {error}") from error

    def check(self) -> None:
        """Raise ConfigError, with the line, where it is no Jinja template."""
        assert self._compiled

    @cached_property
    def marks_generation(self) -> bool:
        """Whether it says itself, by `{% generation %}`, which text the assistant writes."""
        return any(re.search(r"\{%-?\s*generation\s*-?%\}", source) for source in self.sources.values())

    @cached_property
    def _compiled(self) -> dict[str, Any]:
        import jinja2

        environment = _environment()
        compiled = {}
        for name, source in self.sources.items():
            try:
                compiled[name] = environment.from_string(source)
            except jinja2.TemplateSyntaxError as error:
                raise ConfigError(f"{self.origin}, line {error.lineno}: not a Jinja template: {error.message}") from error
        return compiled

    def export(self, folder: Path) -> None:
        """Write the template, and what it calls its tokens, into a tokenizer's folder, from which `find_template` reads them back."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, source in self.sources.items():
            path = folder / FILE if name == DEFAULT else folder / FOLDER / f"{name}.jinja"
            path.parent.mkdir(exist_ok=True)
            path.write_text(source, encoding="utf-8", newline="")
        file = folder / CONFIG
        settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        missing: dict[str, Any] = {name: token for name, token in self.tokens.items() if settings.get(name) is None}
        if "bos_token" in missing:  # the template's alone: the tokenizer begins no document with it
            missing["add_bos_token"] = False
        file.write_text(json.dumps({**settings, **missing}, indent=2) + "\n", encoding="utf-8")


def read_template(file: Path, *, beside: Path | None = None) -> ChatTemplate:
    """The template in a file.

    Args:
        file: Jinja text.
        beside: the tokenizer's folder (or its tokenizer.json), which says what its tokens are called; none: the file's own.

    Raises:
        ConfigError: the file cannot be read or is not a template.
    """
    try:
        source = _read(file)
    except OSError as error:
        raise ConfigError(f"the chat template {file} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the chat template {file} is not UTF-8 text (byte {error.start:,})") from error
    template = ChatTemplate({DEFAULT: source}, _tokens(beside or file.parent), f"the chat template {file}")
    template.check()
    return template


def find_template(tokenizer: Path) -> ChatTemplate | None:
    """The template that a tokenizer's folder (or the folder of a tokenizer.json) holds; none where it holds none.

    A chat_template.jinja comes before `chat_template` of the tokenizer_config.json, as in transformers. It is not looked
    into (see `ChatTemplate.check`). Raises ConfigError where there are templates, but no default.
    """
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    sources = {file.stem: _read(file) for file in sorted((folder / FOLDER).glob("*.jinja"))}
    if (folder / FILE).is_file():
        sources[DEFAULT] = _read(folder / FILE)
        origin = f"the chat template {folder / FILE}"
    else:
        sources |= _configured(folder / CONFIG)
        origin = f"the chat template of {folder / 'tokenizer_config.json'}"
    if not sources:
        return None
    if DEFAULT not in sources:
        raise ConfigError(f"{folder} has chat templates named {', '.join(sorted(sources))}, and none that is the default")
    return ChatTemplate(sources, _tokens(folder), origin)


def configured_template(tokenizer: TokenizerConfig) -> ChatTemplate | None:
    """The template that a run's config names, or the one beside its tokenizer. Raises ConfigError as `read_template` and `find_template` do."""
    beside = None if tokenizer.path is None else Path(tokenizer.path)
    if tokenizer.chat_template is not None:
        return read_template(Path(tokenizer.chat_template), beside=beside)
    return None if beside is None else find_template(beside)


def _configured(file: Path) -> dict[str, str]:
    """Templates of a tokenizer_config.json, by name: one text, or a list of named ones."""
    content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    given = content.get("chat_template")
    if given is None:
        return {}
    try:
        named = {DEFAULT: given} if isinstance(given, str) else {entry["name"]: entry["template"] for entry in given}
    except (TypeError, KeyError) as error:
        raise ConfigError(f"{file}: chat_template is neither a text nor a list of entries with a name and a template") from error
    return named


def _read(file: Path) -> str:
    return file.read_bytes().decode("utf-8")  # as it stands: a line's end is part of what is rendered


def _tokens(place: Path) -> dict[str, str]:
    folder = place if place.is_dir() else place.parent
    return {name: token for name, token in declared_specials(folder).items() if token is not None}


def _environment() -> Any:
    """Jinja with what transformers gives to templates, and no way out of its sandbox."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}...{% endgeneration %}`: text that the assistant writes."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's own way

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_around"), [], [], body).set_lineno(line)

        def _around(self, caller: Callable[[], str]) -> str:
            return f"{OPEN}{caller()}{CLOSE}"

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
        # Jinja's own filter sorts keys and escapes what HTML would.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
