"""Files written tensor by tensor are what the safetensors library reads, and no tensor is held once it is written."""

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from telamon.hub.safetensors_format import read_header
from telamon.hub.safetensors_writer import SafetensorsWriter
from telamon.hub.source import TensorInfo

TYPES = [np.bool_, np.uint8, ml_dtypes.bfloat16, np.float16, np.int32, np.float32, np.int64, np.float64]


def write(path, tensors):
    with SafetensorsWriter(path, {name: TensorInfo(array.shape, array.dtype.name) for name, array in tensors.items()}) as writer:
        for name in writer.order:
            writer.write(name, tensors[name])


def test_the_library_reads_what_was_written_bit_by_bit(tmp_path):
    """Every type, odd sizes, no values, no dims, and an array that lies transposed."""
    rng = np.random.default_rng(0)
    tensors = {np.dtype(kind).name: rng.normal(size=(3, 7)).astype(kind) for kind in TYPES}
    tensors |= {"scalar": np.full((), 2.5, np.float32), "empty": np.zeros((0, 3), np.float32)}
    tensors |= {"transposed": rng.normal(size=(5, 9)).astype(np.float32).T, "every second": np.arange(20, dtype=np.float32)[::2]}
    write(tmp_path / "a.safetensors", tensors)
    read = load_file(tmp_path / "a.safetensors")
    assert set(read) == set(tensors)
    for name, array in tensors.items():
        assert read[name].dtype == array.dtype and read[name].shape == array.shape
        assert read[name].tobytes() == array.tobytes()


def test_each_tensor_lies_where_its_type_can_be_read_in_place(tmp_path):
    tensors = {np.dtype(kind).name: np.ones(3, kind) for kind in TYPES}
    write(tmp_path / "a.safetensors", tensors)
    assert all(entry.offset % entry.info.itemsize == 0 for entry in read_header(tmp_path / "a.safetensors").values())


def test_the_file_says_it_holds_what_transformers_asks_for(tmp_path):
    write(tmp_path / "a.safetensors", {"a": np.ones(3, np.float32)})
    with safe_open(tmp_path / "a.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_tensor_of_several_blocks_is_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("telamon.hub.safetensors_writer._BLOCK", 1000)
    array = np.arange(97 * 31, dtype=np.float32).reshape(31, 97).T
    write(tmp_path / "a.safetensors", {"a": array})
    assert load_file(tmp_path / "a.safetensors")["a"].tobytes() == array.tobytes()


@pytest.mark.parametrize("array", [np.zeros(3, np.float32), np.zeros((4,), np.float16)])
def test_what_was_not_announced_is_a_bug(tmp_path, array):
    with (
        pytest.raises(AssertionError, match="a"),
        SafetensorsWriter(tmp_path / "a.safetensors", {"a": TensorInfo((4,), "float32")}) as writer,
    ):
        writer.write("a", array)


def test_a_file_that_lacks_a_tensor_is_a_bug(tmp_path):
    with (
        pytest.raises(AssertionError, match="not written to its end"),
        SafetensorsWriter(tmp_path / "a.safetensors", {"a": TensorInfo((4,), "float32")}),
    ):
        pass
