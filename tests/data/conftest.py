from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from telamon.config.schema import RunConfig

WORDS = ("def", "return", "value", "for", "in", "range", "print", "self", "import", "class", "while", "total", "héllo", "数")


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., RunConfig]:
    """A run config with small sizes and a cache of the test's own; data and train take fields of these sections."""

    def make(*, data: dict[str, Any], train: dict[str, Any] | None = None, vocab_size: int = 4096) -> RunConfig:
        data = {"cache_dir": str(tmp_path / "cache"), "tokenizer": {"vocab_size": 300}, **data}
        return RunConfig.model_validate(
            _tuples({"data": data, "train": {"seq_len": 16, "batch_size": 4, **(train or {})}, "model": {"vocab_size": vocab_size}})
        )

    return make


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    """Thirty text files of 1 to 60 words."""
    folder = tmp_path / "texts"
    for i in range(30):
        file = folder / f"part{i % 3}" / f"{i:02}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(" ".join(WORDS[(i * j + j) % len(WORDS)] for j in range(1 + 2 * i)) + "\n", encoding="utf-8")
    return folder


def _tuples(value: Any) -> Any:
    """Lists as tuples, all the way down: the schema takes no lists."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
