"""Which family reads which model_type."""

import pytest
import tiny

from telamon.config import registry
from telamon.models.dense import DenseSizes
from telamon.models.hf import config_from_hf, hf_families
from telamon.models.llama import LlamaConfig


class OwnSizes(DenseSizes):
    family: str = "own_sizes"


class OwnLlama(LlamaConfig):
    family: str = "own_llama"


@pytest.mark.parametrize("cls", [OwnSizes, OwnLlama])
def test_a_family_without_a_model_type_of_its_own_reads_nothing(monkeypatch, cls):
    """A family of a user's module, built on one of ours, neither breaks imports nor takes Llama's files."""
    registry.families()  # brings in the built-in ones
    monkeypatch.setattr(registry, "_families", {**registry._families, cls.model_fields["family"].default: cls})
    assert cls not in hf_families().values()
    assert type(config_from_hf(tiny.sizes().to_hf())) is LlamaConfig
