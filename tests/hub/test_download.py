"""Repositories of a hub: what is fetched, from which revision, what happens when a connection breaks, and what a refusal says."""

import os
import subprocess
import sys

import numpy as np
import pytest
from checkpoint_folders import llama_config, write_folder
from huggingface_hub import constants
from loopback_hub import TOKEN, serving

from telamon.errors import ConfigError, DataError
from telamon.hub.opening import open_source


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub on loopback, an empty cache, and nobody's token."""
    with serving() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield hub


def checkpoint(folder, value, *, config=None, **more):
    """A folder whose weights and config (`initializer_range`) tell which it is."""
    tensors = {f"layer{i}": np.full((64, 64), value + i, np.float32) for i in range(3)}
    return write_folder(folder, tensors, (config or llama_config()) | {"initializer_range": value}, **more)


def test_a_repository_is_fetched_with_what_belongs_to_the_model(hub, tmp_path):
    folder = checkpoint(tmp_path / "a", 1.0, shards=2)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (folder / name).write_text("{}")
    for name in ("pytorch_model.bin", "consolidated.safetensors", "README.md", "model.onnx"):
        (folder / name).write_text("not wanted")
    commit = hub.add("org/model", folder)
    with open_source("org/model") as source:
        assert source.origin == f"org/model@{commit}"
        assert sorted(source.tensors) == ["layer0", "layer1", "layer2"]
        assert np.array_equal(source.read("layer2"), np.full((64, 64), 3.0, np.float32))
        assert sorted(source.assets) == ["chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    for name in ("pytorch_model.bin", "consolidated.safetensors", "README.md", "model.onnx"):
        assert not hub.downloads(name)


def test_branches_tags_and_commits_give_their_own_files(hub, tmp_path):
    commits = {
        revision: hub.add("org/model", checkpoint(tmp_path / revision, value), revision=revision)
        for value, revision in enumerate(["main", "v1"])
    }
    for revision, value in [(None, 0), ("main", 0), ("v1", 1), (commits["v1"], 1), (commits["main"], 0)]:
        with open_source("org/model", revision=revision) as source:
            assert source.config["initializer_range"] == value
            assert source.read("layer0")[0, 0] == value


def test_a_cut_download_goes_on_where_it_broke(hub, tmp_path, monkeypatch):
    """The connection drops twice; each time what is not yet on disk is asked for with a Range, and the file is whole."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1024)  # what is written at a time
    folder = checkpoint(tmp_path / "a", 1.0)
    hub.add("org/model", folder)
    hub.cuts["model.safetensors"] = [20 * 1024 + 5, 10 * 1024]
    with open_source("org/model") as source:
        assert np.array_equal(source.read("layer2"), np.full((64, 64), 3.0, np.float32))
    ranges = [asked.range for asked in hub.downloads("model.safetensors")]
    assert ranges == [None, f"bytes={20 * 1024}-", f"bytes={30 * 1024}-"]


def test_whole_files_of_a_download_that_failed_are_not_fetched_again(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.add("org/model", checkpoint(tmp_path / "a", 1.0, shards=2))
    hub.cuts["model-00002-of-00002.safetensors"] = [0] * 100
    with pytest.raises(
        DataError, match=r"org/model at http://127.* could not be fetched whole: .*Run the command again: files already whole"
    ):
        open_source("org/model")
    hub.cuts.clear()
    open_source("org/model")
    assert len(hub.downloads("model-00001-of-00002.safetensors")) == 1


def test_what_is_in_the_cache_needs_no_hub(hub, tmp_path, monkeypatch):
    hub.add("org/model", checkpoint(tmp_path / "a", 1.0))
    open_source("org/model")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with open_source("org/model") as source:
        assert source.config["initializer_range"] == 1.0


@pytest.mark.parametrize(
    ("token", "told"),
    [
        (None, "set HF_TOKEN to a token of that account"),
        ("hf_stranger", r"set HF_TOKEN to a token of that account \(the one that is set was not accepted\)"),
    ],
)
def test_a_gated_repository_says_what_opens_it(hub, tmp_path, monkeypatch, token, told):
    hub.add("org/gated", checkpoint(tmp_path / "a", 1.0), gated=True)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(DataError, match=rf"org/gated at .* is gated: accept its terms on the page {hub.endpoint}/org/gated, and {told}"):
        open_source("org/gated")


def test_an_accepted_token_opens_a_gated_repository(hub, tmp_path, monkeypatch):
    hub.add("org/gated", checkpoint(tmp_path / "a", 1.0), gated=True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with open_source("org/gated") as source:
        assert source.config["initializer_range"] == 1.0


@pytest.mark.parametrize("token", [None, "hf_somebody"])  # the hub answers 401 to strangers, 404 to those it knows
def test_a_repository_that_does_not_exist_is_named(hub, monkeypatch, token):
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(DataError, match=r"there is no repository org/nothing at http.*, or it is private or gated and needs a token"):
        open_source("org/nothing")


def test_a_revision_that_does_not_exist_is_named(hub, tmp_path):
    hub.add("org/model", checkpoint(tmp_path / "a", 1.0))
    with pytest.raises(DataError, match=r"org/model at .* has no revision v9; --revision takes a branch, a tag or a commit"):
        open_source("org/model", revision="v9")


def test_a_hub_that_cannot_be_reached_is_said_to_be_so(hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        DataError, match=r"org/model at http://127.0.0.1:9 cannot be reached.*Offline, a folder with the model's files can be imported"
    ):
        open_source("org/model")


def test_a_hub_that_is_down_is_said_to_be_so(hub, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.broken = 503
    with pytest.raises(DataError, match=r"org/model at .* cannot be reached .*503 Service Unavailable"):
        open_source("org/model")


def test_a_repository_of_pickles_is_refused(hub, tmp_path):
    folder = checkpoint(tmp_path / "a", 1.0)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    hub.add("org/model", folder)
    with pytest.raises(DataError, match=r"org/model holds neither model.safetensors nor .*\.bin files are pickles and are not read"):
        open_source("org/model")
    assert not hub.downloads("pytorch_model.bin")


def test_a_model_that_no_family_reads_is_refused_before_its_weights_are_fetched(hub, tmp_path):
    hub.add("org/model", checkpoint(tmp_path / "a", 1.0, config={"model_type": "lama"}))
    with pytest.raises(
        ConfigError, match=r"org/model: config.json: model_type='lama' belongs to no family here; those that can be read: .*llama, "
    ):
        open_source("org/model")
    assert not hub.downloads("model.safetensors")


def test_a_path_that_nearly_exists_is_offered_where_the_hub_has_no_such_repository(hub, tmp_path, monkeypatch):
    checkpoint(tmp_path / "models" / "tiny-llama", 1.0)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"Nor is there a folder models/tiny-lama; did you mean models/tiny-llama\?"):
        open_source("models/tiny-lama")


def test_the_environment_of_the_library_holds(tmp_path):
    """HF_ENDPOINT, HF_TOKEN and HF_HOME, as a shell sets them before the program starts."""
    code = "from telamon.hub.opening import open_source; source = open_source('org/gated'); print(source.origin, source.config['initializer_range'])"
    with serving() as hub:
        commit = hub.add("org/gated", checkpoint(tmp_path / "a", 7), gated=True)
        environment = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "home")}
        environment.pop("HF_HUB_CACHE", None)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [f"org/gated@{commit}", "7"]
    assert (tmp_path / "home" / "hub" / "models--org--gated").is_dir()
