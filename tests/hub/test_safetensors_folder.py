"""Folders of safetensors: read bit by bit as the library reads them, one tensor at a time, and refused by name when they are not whole."""

import json
import os
import shutil
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from checkpoint_folders import write_folder, write_index, write_raw
from safetensors.numpy import load_file

from telamon.errors import ConfigError, DataError
from telamon.hub.opening import open_source
from telamon.hub.safetensors_folder import SafetensorsFolder
from telamon.hub.safetensors_format import read_header
from telamon.hub.source import TensorInfo

CONFIG = {"model_type": "llama"}
TYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.uint8, np.bool_]


def tensors(seed=0):
    rng = np.random.default_rng(seed)
    found = {f"{np.dtype(kind).name}.weight": rng.normal(size=(3, 5)).astype(kind) for kind in TYPES}
    return found | {"scalar": np.full((), 3.5, np.float32), "empty": np.zeros((0, 4), np.float32)}


@pytest.mark.parametrize("shards", [1, 3])
def test_every_type_is_read_bit_equal_to_what_was_written(tmp_path, shards):
    written = tensors()
    with SafetensorsFolder(write_folder(tmp_path, written, CONFIG, shards=shards)) as source:
        assert source.config == CONFIG and source.origin == str(tmp_path)
        assert source.tensors == {name: TensorInfo(array.shape, array.dtype.name) for name, array in written.items()}
        for name, array in written.items():
            read = source.read(name)
            assert read.dtype == array.dtype and read.shape == array.shape and read.tobytes() == array.tobytes()


def test_a_whole_file_comes_before_an_index_as_in_transformers(tmp_path):
    write_folder(tmp_path, {"a": np.zeros(2, np.float32), "b": np.zeros(2, np.float32)}, CONFIG, shards=2)
    write_folder(tmp_path, {"a": np.ones(2, np.float32)}, CONFIG)
    assert list(SafetensorsFolder(tmp_path).tensors) == ["a"]


def test_memory_does_not_grow_with_the_tensors_read(tmp_path):
    """Eight shards, each one tensor of 16 MB: reading them all takes less than two tensors above what one process needs."""
    size = 4_000_000
    write_folder(tmp_path, {f"t{i}": np.full(size, i, np.float32) for i in range(8)}, CONFIG, shards=8)
    code = f"""
import resource, sys
from pathlib import Path
import numpy, ml_dtypes, safetensors
from telamon.hub.safetensors_folder import SafetensorsFolder
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
with SafetensorsFolder(Path({str(tmp_path)!r})) as source:
    for i in range(8):
        assert source.read(f"t{{i}}")[-1] == i
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < 2 * 4 * size


def refused(folder, message):
    with pytest.raises(DataError, match=message) as raised:
        SafetensorsFolder(folder)
    assert str(folder) in str(raised.value)


def index_of(folder):
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


@pytest.fixture
def sharded(tmp_path):
    return write_folder(tmp_path / "model", {f"layer{i}": np.full((4, 4), i, np.float32) for i in range(6)}, CONFIG, shards=3)


def test_a_missing_shard_is_named(sharded):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    refused(sharded, r"1 of 3 shards that .*index.json names are missing: model-00002-of-00003.safetensors; finish the download")


@pytest.mark.parametrize("kept", [0, 5, 20])
def test_a_shard_cut_within_its_header_is_named(sharded, kept):
    os.truncate(sharded / "model-00002-of-00003.safetensors", kept)
    refused(sharded, r"model-00002-of-00003.safetensors is cut short: its \d+ bytes end within the header; fetch the file again")


def test_a_shard_cut_within_its_data_is_named(sharded):
    path = sharded / "model-00003-of-00003.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - 1)
    refused(sharded, rf"model-00003-of-00003.safetensors is cut short: its header describes {size} bytes and it has {size - 1}; fetch")


def test_a_file_that_shrinks_after_it_was_opened_is_named(sharded):
    with SafetensorsFolder(sharded) as source:
        os.truncate(sharded / "model-00003-of-00003.safetensors", 100)
        with pytest.raises(DataError, match=r"model-00003-of-00003.safetensors became shorter .* tensor layer5"):
            source.read("layer5")


def test_an_index_that_names_a_tensor_no_shard_has_is_refused(sharded):
    write_index(sharded, index_of(sharded) | {"layer9": "model-00001-of-00003.safetensors"})
    refused(sharded, "does not fit its shards: layer9 is not in model-00001-of-00003.safetensors, where the index has it")


def test_an_index_that_names_the_wrong_shard_is_refused(sharded):
    write_index(sharded, index_of(sharded) | {"layer0": "model-00003-of-00003.safetensors"})
    refused(sharded, "layer0 is in model-00001-of-00003.safetensors, the index has it in model-00003-of-00003.safetensors")


def test_a_tensor_that_the_index_lacks_is_refused(sharded):
    listed = index_of(sharded)
    del listed["layer4"]
    write_index(sharded, listed)
    refused(sharded, "layer4 is in model-00002-of-00003.safetensors, not in the index")


def test_a_tensor_in_two_shards_is_refused(sharded):
    shutil.copy(sharded / "model-00001-of-00003.safetensors", sharded / "model-00002-of-00003.safetensors")
    refused(
        sharded, r"layer0 is in model-00001-of-00003.safetensors and model-00002-of-00003.safetensors, layer3 is in .* and 1 more; fetch"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "holds no JSON object"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {"a": 3}}', "has no weight_map"),
        ('{"weight_map": {"a": "../other/model.safetensors"}}', "names files outside its folder: ../other/model.safetensors"),
    ],
)
def test_a_malformed_index_is_refused(sharded, content, message):
    (sharded / "model.safetensors.index.json").write_text(content)
    refused(sharded, message)


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"not json!", b"", "its header is no JSON"),
        ([], b"", "its header is no JSON object"),
        ({"a": {"dtype": "F32", "shape": [2]}}, bytes(8), "its header describes the tensor a as"),
        ({"a": F32 | {"shape": [-2]}}, bytes(8), "its header describes the tensor a as"),
        ({"a": F32 | {"shape": [3]}}, bytes(8), r"the tensor a of type F32 and shape \(3,\) has 8 bytes"),
        (
            {"a": F32 | {"dtype": "F8_E5M2", "shape": [8]}},
            bytes(8),
            "the tensor a is of type F8_E5M2, which is not read .read are F64, F32",
        ),
        # What only the library's own check sees:
        ({"a": F32, "b": F32 | {"data_offsets": [12, 20]}}, bytes(20), "not a valid safetensors file"),
        ({"a": F32, "b": F32 | {"data_offsets": [4, 12]}}, bytes(12), "not a valid safetensors file"),
        ({"a": F32}, bytes(9), "not a valid safetensors file"),
    ],
)
def test_a_malformed_header_is_refused(tmp_path, header, data, message):
    write_raw(tmp_path / "model.safetensors", header, data)
    with pytest.raises(DataError, match=message) as raised:
        read_header(tmp_path / "model.safetensors")
    assert str(tmp_path / "model.safetensors") in str(raised.value)


def test_what_the_library_writes_and_reads_the_header_parser_accepts(tmp_path):
    write_folder(tmp_path, tensors(), CONFIG)
    assert set(read_header(tmp_path / "model.safetensors")) == set(load_file(tmp_path / "model.safetensors"))


def test_something_else_under_the_name_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n")
    with pytest.raises(DataError, match="is a Git LFS pointer, not the file itself; run `git lfs pull`"):
        read_header(path)
    path.write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(DataError, match=r"is not a safetensors file: it would begin with a header of [\d,]+ bytes"):
        read_header(path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "is empty; a model folder holds config.json"),
        ({"model.safetensors": ""}, "has no config.json; a model folder holds"),
        ({"config.yaml": ""}, "is a run of this program; `telamon export` writes it"),
        ({"adapter_config.json": "{}"}, "holds an adapter, not a model; merge it"),
        ({"config.json": "{"}, "config.json is not valid JSON"),
        ({"config.json": "3"}, "config.json holds no JSON object"),
        ({"config.json": "{}"}, "has neither model.safetensors nor model.safetensors.index.json; fetch"),
        ({"config.json": "{}", "consolidated.safetensors": ""}, "only consolidated.safetensors; fetch"),
        (
            {"config.json": "{}", "pytorch_model.bin": ""},
            r"only pytorch_model.bin: a pickle.*is not read.*save_pretrained\(FOLDER\) in transf",
        ),
    ],
)
def test_a_folder_that_is_no_model_is_told_what_it_lacks(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    refused(tmp_path, message)


def test_tokenizer_files_are_carried_along(tmp_path):
    write_folder(tmp_path, {"a": np.zeros(1, np.float32)}, CONFIG)
    for name in ("tokenizer.json", "chat_template.jinja", "README.md"):
        (tmp_path / name).write_text("x")
    source = SafetensorsFolder(tmp_path)
    assert dict(source.assets) == {name: tmp_path / name for name in ("tokenizer.json", "chat_template.jinja")}


@pytest.mark.parametrize(
    ("src", "message"),
    [
        ("modles", r"there is no modles; did you mean models\?; a model to import is a folder"),
        ("models/tiny.ggfu/", r"there is no models/tiny.ggfu/; did you mean models/tiny.gguf\?"),
        ("models/small.gguf", r"there is no models/small.gguf"),
        ("nothing", "a .gguf file, or a repository of the Hugging Face Hub such as"),
        ("https://hub.example/Org/Model-1B/tree/main", r"did you mean Org/Model-1B\?; a model to import is"),
        ("a/b/c", "there is no a/b/c; a model to import is a folder"),
        ("models/notes.txt", "models/notes.txt is a file of another kind"),
        ("models/model.safetensors", "is one file of a model; name its folder, models"),
    ],
)
def test_what_is_none_of_the_three_forms_is_told_them(tmp_path, monkeypatch, src, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for name in ("tiny.gguf", "notes.txt", "model.safetensors"):
        (tmp_path / "models" / name).write_text("x")
    with pytest.raises(ConfigError, match=message):
        open_source(src)


def test_a_revision_of_a_local_path_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--revision v1 names a state of a repository, and .* is a local path"):
        open_source(str(tmp_path), revision="v1")


def test_a_link_to_a_file_that_is_gone_is_called_one(tmp_path):
    """As a cache leaves it that was cleaned up by hand."""
    folder = write_folder(tmp_path / "model", {"a": np.zeros(3, np.float32)}, CONFIG)
    (folder / "model.safetensors").rename(tmp_path / "blob")
    (folder / "model.safetensors").symlink_to("../blob")
    assert SafetensorsFolder(folder).tensors.keys() == {"a"}
    (tmp_path / "blob").unlink()
    refused(folder, r"index.json: model.safetensors is a link to ../blob, which is not there; fetch the file again")


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_json_that_is_nested_without_end_is_refused(tmp_path, file):
    folder = write_folder(tmp_path / "model", {"a": np.zeros(3, np.float32)}, CONFIG)
    text = b"[" * 100_000
    (folder / file).write_bytes(text if file == "config.json" else len(text).to_bytes(8, "little") + text)
    refused(folder, f"{file} is not ")


def test_a_repository_of_the_cache_is_told_where_its_model_is(tmp_path):
    write_folder(tmp_path / "models--org--name" / "snapshots" / "abc", {"a": np.zeros(3, np.float32)}, CONFIG)
    refused(tmp_path / "models--org--name", r"name one of its states, .*models--org--name/snapshots/abc")
