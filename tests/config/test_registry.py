"""The open registry of model families."""

import pytest
from pydantic import Field

from telamon.config import registry
from telamon.config.schema import ModelConfig
from telamon.errors import ConfigError


def test_two_classes_of_one_name_are_refused():
    class Other(ModelConfig):
        family: str = Field(default="toy", description="Family of the model.")

    with pytest.raises(ConfigError, match="two model families are named 'toy'"):
        registry.register_family(Other)
    assert registry.family("toy").__name__ == "ToyConfig"


def test_a_fault_inside_a_users_module_keeps_its_traceback(tmp_path, monkeypatch):
    (tmp_path / "faulty_blocks.py").write_text("import not_installed_anywhere\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        registry.import_plugins(("faulty_blocks",))
