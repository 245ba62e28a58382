"""Every family through `telamon import` and `telamon export`: what comes in goes out again, and what does not fit is named."""

import json
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
from reference import fixtures
from safetensors.numpy import load_file, save_file

from telamon.config.load import load_run
from telamon.errors import DataError
from telamon.hub.exporting import export_run
from telamon.hub.importing import import_from
from telamon.hub.safetensors_folder import SafetensorsFolder
from telamon.models.hf import config_from_hf, hf_families
from telamon.watch.log import make_console

QUIET = make_console(quiet=True)
# One of each family, and what files differ by: a tied head, biases, bfloat16, several files, a text model within a larger one.
NAMES = [
    *("llama-biases", "llama-bf16", "llama-shards", "llama-tied-odd", "mistral-window", "qwen2", "qwen2-tied", "qwen3-biases", "gpt2"),
    *("gemma", "gemma2", "gemma3", "gemma3-conditional", "gemma3-conditional-renamed", "olmo2", "olmo3-yarn"),
    *("mixtral-window", "qwen3-moe-step", "gpt-oss", "llama4-maverick", "llama4-conditional"),
    *("deepseek-v2-lite", "deepseek-v3-mtp", "kimi-k2-older", "kimi-k25"),
]


def _read(folder: Path) -> dict[str, np.ndarray]:
    with SafetensorsFolder(folder) as source:
        return {name: np.array(source.read(name)) for name in source.tensors}


def test_every_family_is_among_them():
    assert {fixtures.load(name).config["model_type"] for name in NAMES} == set(hf_families())


@pytest.mark.parametrize("name", NAMES)
def test_in_and_out_again_is_bit_equal(name: str, tmp_path: Path):
    """Names, types and values; the config reads as the same model."""
    fixture = fixtures.load(name)
    source = fixture.checkpoint(tmp_path / "source")
    run = import_from(str(source), tmp_path / "run", console=QUIET)
    export_run(str(run), tmp_path / "out", console=QUIET)
    config = config_from_hf(fixture.config)
    expected = {ours: array for theirs, array in _read(source).items() if (ours := config.canonical(theirs)) is not None}
    found = _read(tmp_path / "out")
    assert found.keys() == expected.keys()
    for tensor, array in expected.items():
        assert found[tensor].dtype == array.dtype, tensor
        assert found[tensor].tobytes() == array.tobytes(), tensor
    assert config_from_hf(json.loads((tmp_path / "out" / "config.json").read_text())) == config
    assert load_run(run / "config.yaml").config.model == config


def _damaged(name: str, folder: Path, change: Any) -> Path:
    """A fixture's folder in one file, its tensors changed."""
    source = fixtures.load(name).checkpoint(folder)
    file = source / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return source


@pytest.mark.parametrize(
    "name",
    [
        "llama-biases",
        "mistral-window",
        "qwen2",
        "qwen3-biases",
        "gpt2",
        "gemma",
        "gemma2",
        "gemma3",
        "olmo2",
        "olmo3-yarn",
        "mixtral",
        "qwen3-moe-mlp-only",
        "gpt-oss",
        "llama4-maverick",
        "deepseek-v2-lite",
        "kimi-k2",
    ],
)
def test_a_tensor_that_is_missing_extra_or_misshaped_is_named(name: str, tmp_path: Path):
    config = checkpoints.config(fixtures.load(name))
    victim = checkpoints.load(name).tensors[7].name
    refused = {
        "missing": (lambda tensors: tensors.pop(victim), victim),
        "extra": (lambda tensors: tensors.update({victim + "_extra": np.zeros(3, np.float32)}), victim + "_extra"),
        "misshaped": (lambda tensors: tensors.update({victim: np.zeros((3, 5), np.float32)}), victim),
    }
    for kind, (change, named) in refused.items():
        source = _damaged(name, tmp_path / kind, change)
        with pytest.raises(DataError) as raised:
            import_from(str(source), tmp_path / "run", console=QUIET)
        assert named in str(raised.value), (config.family, kind, str(raised.value))
        assert not (tmp_path / "run").exists()
    assert "(3, 5)" in str(raised.value) or "3 x 5" in str(raised.value) or "[3, 5]" in str(raised.value)
