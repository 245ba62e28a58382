"""A family of the tests' own, registered as a user's module would, so that loading is tested apart from any real model."""

import pytest
from pydantic import Field

from telamon.config.registry import register_family
from telamon.config.schema import ModelConfig, Positive


@register_family
class ToyConfig(ModelConfig):
    family: str = Field(default="toy", description="Family of the model.")
    n_heads: Positive = Field(default=4, description="Heads.")
    n_kv_heads: Positive = Field(default=2, description="Key and value heads.")

    def divided(self) -> dict[str, dict[str, int]]:
        return {**super().divided(), "tensor": {"n_heads": self.n_heads, "n_kv_heads": self.n_kv_heads}}


@pytest.fixture
def toy(tmp_path):
    """A run file that sets a few values."""
    path = tmp_path / "toy.yml"
    path.write_text("model:\n  family: toy\n  n_heads: 8\ntrain:\n  steps: 50\noptimizer:\n  # nothing yet\n", encoding="utf-8")
    return path


@pytest.fixture
def toy_preset(tmp_path, monkeypatch):
    """A model preset `small` of width 64, and a run preset `first` that chooses it."""
    monkeypatch.setattr("telamon.config.presets.ROOT", tmp_path)
    for name, text in {"models/small": "family: toy\nd_model: 64\nn_heads: 2\n", "runs/first": "model: {preset: small}\n"}.items():
        file = tmp_path / f"{name}.yml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
