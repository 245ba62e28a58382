"""The presets that ship."""

import pytest

from telamon.config import presets
from telamon.config.load import load_run
from telamon.errors import ConfigError


@pytest.mark.parametrize("name", presets.names("runs"))
def test_a_run_preset_loads_and_its_head_says_what_to_expect(name):
    assert load_run(name).name == name
    assert presets.find("runs", name).read_text(encoding="utf-8").startswith("# ")


@pytest.mark.parametrize("name", presets.names("models"))
def test_a_model_preset_gives_every_size_of_its_family(name):
    loaded = load_run(overrides=[f"model.preset={name}"])
    sizes = {"family", "vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff", "n_positions", "tie_embeddings"}
    for key in set(loaded.value("model")) & (sizes | {"published_parameters"}):
        assert f"in the preset {name}" in loaded.origin(f"model.{key}"), key


def test_an_unknown_preset_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="no run preset is named 'defualt'; did you mean 'default'"):
        load_run("defualt")
    with pytest.raises(ConfigError, match="no run preset is named 'qwen3-8b'; it is a model: model"):
        load_run("qwen3-8b")
    with pytest.raises(ConfigError, match="no model preset is named 'qwen3-8'; did you mean 'qwen3-8b'"):
        load_run(overrides=["model.preset=qwen3-8"])
