"""Weights in few bits: unpacked bit for bit as the libraries that define the formats do it, and refused by name where they cannot be.

`tests/reference/packed` holds codes with what transformers (MXFP4, FP8) and compressed-tensors (INT4) make of them, made by `make_packed.py`.
"""

import hashlib
import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from telamon.errors import ConfigError, DataError
from telamon.hub.opening import open_source
from telamon.hub.packed import tensor as packed_tensor
from telamon.hub.packed.source import packing_of, plain_config
from telamon.hub.safetensors_folder import SafetensorsFolder
from telamon.hub.safetensors_writer import SafetensorsWriter
from telamon.hub.source import TensorInfo

PACKED = Path(__file__).parent.parent / "reference" / "packed"
FORMATS = ("mxfp4", "fp8", "int4")
MODELS = ("gpt-oss", "deepseek-v3", "kimi-k2")


@pytest.mark.parametrize("room", [1 << 24, 210], ids=["at once", "in strides that end within blocks"])
@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_unpacked_bit_for_bit(name: str, room: int, monkeypatch: pytest.MonkeyPatch):
    """All codes, with factors that lead to infinity, below the least normal number, to zero and to negative zero."""
    monkeypatch.setattr(packed_tensor, "ROOM", room)
    expected = load_file(PACKED / f"codes-{name}" / "unpacked.safetensors")
    with open_source(str(PACKED / f"codes-{name}")) as source:
        assert source.tensors == {tensor: TensorInfo(array.shape, "bfloat16") for tensor, array in expected.items()}
        for tensor, array in expected.items():
            found = source.read(tensor)
            assert found.dtype == array.dtype == ml_dtypes.bfloat16
            np.testing.assert_array_equal(found.view(np.uint16), array.view(np.uint16), err_msg=tensor)


def test_the_codes_hold_what_could_go_wrong():
    values = {name: load_file(PACKED / f"codes-{name}" / "unpacked.safetensors").values() for name in FORMATS}
    flat = {name: np.concatenate([array.ravel().astype(np.float32) for array in arrays]) for name, arrays in values.items()}
    least = np.finfo(np.float32).tiny
    for name, array in flat.items():
        assert np.isinf(array).any(), name
        assert ((array != 0) & (np.abs(array) < least)).any(), name
        assert ((array == 0) & np.signbit(array)).any(), name
        assert not np.isnan(array[np.isfinite(array)]).any()


@pytest.mark.parametrize("name", MODELS)
def test_a_whole_checkpoint_shows_its_plain_tensors(name: str):
    expected = json.loads((PACKED / name / "meta.json").read_text())["sha256"]
    with open_source(str(PACKED / name)) as source:
        assert "quantization_config" not in source.config
        assert set(source.tensors) == set(expected)
        for tensor, digest in expected.items():
            assert hashlib.sha256(source.read(tensor).tobytes()).hexdigest() == digest, tensor
            kept = tensor.endswith("e_score_correction_bias")
            assert source.tensors[tensor].dtype == ("float32" if kept else "bfloat16")


@pytest.mark.parametrize("name", FORMATS)
def test_one_tensor_is_unpacked_at_a_time(name: str, tmp_path: Path):
    """Beyond the tensor itself and what it is read from, a fixed room: a stride of float32 on its way."""
    sizes = {"mxfp4": (4, 1024, 64), "fp8": (4096, 2048), "int4": (4096, 2048)}[name]
    folder = _large(name, sizes, tmp_path / "model")
    monkey = pytest.MonkeyPatch()
    monkey.setattr(packed_tensor, "ROOM", 1 << 17)
    try:
        with open_source(str(folder)) as source:
            (tensor,) = source.tensors
            source.read(tensor)  # tables are made once
            tracemalloc.start()
            array = source.read(tensor)
            peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        monkey.undo()
    assert array.nbytes > 8e6
    assert peak < 3 * array.nbytes


def _large(name: str, sizes: tuple[int, ...], folder: Path) -> Path:
    random = np.random.default_rng(0)
    config = json.loads((PACKED / f"codes-{name}" / "config.json").read_text())
    if name == "mxfp4":
        E, O, count = sizes
        tensors = {"x_blocks": random.integers(0, 256, (E, O, count, 16), np.uint8), "x_scales": np.full((E, O, count), 127, np.uint8)}
    elif name == "fp8":
        codes = random.integers(0, 127, sizes, np.uint8).view(ml_dtypes.float8_e4m3fn)
        tensors = {"x.weight": codes, "x.weight_scale_inv": np.ones((sizes[0] // 16, sizes[1] // 8), np.float32)}
    else:
        packed = random.integers(0, 1 << 31, (sizes[0], sizes[1] // 8), np.int32)
        scales = np.ones((sizes[0], sizes[1] // 32), ml_dtypes.bfloat16)
        tensors = {"x.weight_packed": packed, "x.weight_scale": scales, "x.weight_shape": np.array(sizes)}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def _changed(name: str, folder: Path, change: Any) -> Path:
    """A folder of codes with its tensors changed."""
    shutil.copytree(PACKED / f"codes-{name}", folder)
    with SafetensorsFolder(folder) as source:
        tensors = {name: source.read(name) for name in source.tensors}
    change(tensors)
    infos = {name: TensorInfo(array.shape, array.dtype.name) for name, array in tensors.items()}
    with SafetensorsWriter(folder / "model.safetensors", infos) as writer:
        for tensor in writer.order:
            writer.write(tensor, tensors[tensor])
    return folder


def _cut(name: str, *index: Any) -> Any:
    return lambda tensors: tensors.update({name: np.ascontiguousarray(tensors[name][index])})


DOWN, PARTIAL, MORE = "model.layers.0.mlp.experts.down_proj", "model.layers.0.partial.weight", "model.layers.1.mlp.experts.more.weight"
FAULTS = {
    "mxfp4 without scales": ("mxfp4", lambda t: t.pop(f"{DOWN}_scales"), f"{DOWN}_scales is missing, without which {DOWN} cannot"),
    "mxfp4 without blocks": ("mxfp4", lambda t: t.pop(f"{DOWN}_blocks"), f"{DOWN}_blocks is missing"),
    "mxfp4 short blocks": ("mxfp4", _cut(f"{DOWN}_blocks", ..., slice(0, 8)), rf"{DOWN}_blocks has shape \(4, 32, 2, 8\); in MXFP4"),
    "mxfp4 cut blocks": (
        "mxfp4",
        _cut(f"{DOWN}_blocks", slice(0, 3)),
        rf"{DOWN}_scales has shape \(4, 32, 2\); .*it has \(3, 32, 2\)",
    ),
    "fp8 without scale": ("fp8", lambda t: t.pop(f"{PARTIAL}_scale_inv"), f"{PARTIAL}_scale_inv is missing"),
    "fp8 without codes": ("fp8", lambda t: t.pop(PARTIAL), f"{PARTIAL} is missing"),
    "fp8 scale of another shape": (
        "fp8",
        _cut(f"{PARTIAL}_scale_inv", slice(0, 2)),
        rf"{PARTIAL}_scale_inv has shape \(2, 3\); beside {PARTIAL} of \(37, 21\), in blocks of 16 x 8, it has \(3, 3\)",
    ),
    "int4 without scale": ("int4", lambda t: t.pop(f"{MORE}_scale"), f"{MORE}_scale is missing"),
    "int4 without shape": ("int4", lambda t: t.pop(f"{MORE}_shape"), f"{MORE}_shape is missing"),
    "int4 without codes": ("int4", lambda t: t.pop(f"{MORE}_packed"), f"{MORE}_packed is missing"),
    "int4 cut codes": (
        "int4",
        _cut(f"{MORE}_packed", slice(None), slice(0, 5)),
        rf"{MORE}_packed has shape \(16, 5\); of 16 x 96 .*it has \(16, 12\)",
    ),
    "int4 groups that do not divide": (
        "int4",
        lambda t: t.update({f"{MORE}_shape": np.array([16, 90])}),
        f"{MORE} has 90 columns, which groups of 32 do not divide",
    ),
    "int4 codes of another type": (
        "int4",
        lambda t: t.update({f"{MORE}_packed": t[f"{MORE}_packed"].astype(np.int64)}),
        f"{MORE}_packed is of type int64; of a packed weight it is int32",
    ),
    "nothing packed": (
        "mxfp4",
        lambda t: (t.clear(), t.update(a=np.zeros(2, np.float32))),
        "by its config.json weights are packed, and none",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_tensors_that_do_not_fit_are_named(fault: str, tmp_path: Path):
    name, change, message = FAULTS[fault]
    folder = _changed(name, tmp_path / "model", change)
    with pytest.raises(DataError, match=message):
        open_source(str(folder))


def test_a_scale_that_stands_for_no_number_is_named(tmp_path: Path):
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors[f"{DOWN}_scales"][1, 2, 0] = 255

    with open_source(str(_changed("mxfp4", tmp_path / "model", change))) as source, pytest.raises(DataError, match=f"{DOWN}_scales .* 255"):
        source.read(DOWN)


def test_a_packed_tensor_of_a_module_that_is_said_to_be_plain_is_named(tmp_path: Path):
    for name, key, pattern, module in [
        ("mxfp4", "modules_to_not_convert", "model.layers.*.mlp", DOWN),
        ("fp8", "modules_to_not_convert", "partial", PARTIAL.removesuffix(".weight")),
        ("int4", "ignore", "re:.*experts.more", MORE.removesuffix(".weight")),
    ]:
        folder = _changed(name, tmp_path / name, lambda tensors: None)
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"][key] = ["lm_head", pattern]
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(DataError, match=f"{module} is packed, and quantization_config excludes it by"):
            open_source(str(folder))


def test_a_router_that_is_plain_excludes_no_projection_of_a_like_name(tmp_path: Path):
    folder = _changed("fp8", tmp_path / "model", lambda tensors: None)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["model.layers.0.part", "model.layers.0.who", "model.layers.1", "wers"]
    (folder / "config.json").write_text(json.dumps(config))
    with open_source(str(folder)) as source:
        assert len(source.tensors) == 4


def _settings(name: str, **changes: Any) -> dict[str, Any]:
    return json.loads((PACKED / f"codes-{name}" / "config.json").read_text())["quantization_config"] | changes


def _weights(**changes: Any) -> dict[str, Any]:
    settings = _settings("int4")
    settings["config_groups"]["group_0"]["weights"] |= changes
    return settings


def _group(**changes: Any) -> dict[str, Any]:
    settings = _settings("int4")
    settings["config_groups"]["group_0"] |= changes
    return settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"quant_method": "gptq", "bits": 4},
            "quant_method='gptq' cannot be read; packed weights are read of mxfp4, fp8, compressed-tensors",
        ),
        ({"bits": 4}, "quant_method=None"),
        (_settings("mxfp4", group_size=16), "not known here: group_size=16"),
        (_settings("fp8", fmt="e5m2"), "fmt='e5m2'"),
        (_settings("fp8", activation_scheme="static"), "activation_scheme='static'"),
        (_settings("fp8", weight_block_size=None), "weight_block_size=None"),
        (_settings("fp8", weight_block_size=[128]), r"weight_block_size=\[128\]"),
        (_settings("fp8", scale_fmt="e5m2"), "scale_fmt='e5m2'"),
        (_settings("int4", format="nvfp4-pack-quantized"), "format='nvfp4-pack-quantized'"),
        (_settings("int4", kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme="),
        (_settings("int4", sparsity_config={"format": "dense"}), "sparsity_config="),
        (_settings("int4", quantization_status="frozen"), "quantization_status='frozen'"),
        (_settings("int4", config_groups={}), r"config_groups=\[\]"),
        (_settings("int4", new=1), "not known here: new=1"),
        (_group(input_activations={"num_bits": 8}), "config_groups: group_0: input_activations="),
        (_group(weights=None), "weights: num_bits=None cannot be read; 4 is needed"),
        (_group(targets=["re:.*experts.*"]), "targets="),
        (_group(new=1), "group_0: not known here: new=1"),
        (_weights(num_bits=8), "num_bits=8"),
        (_weights(type="float"), "type='float'"),
        (_weights(symmetric=False), "symmetric=False"),
        (_weights(strategy="channel"), "strategy='channel'"),
        (_weights(group_size=-1), "group_size=-1"),
        (_weights(dynamic=True), "dynamic=True"),
        (_weights(actorder="group"), "actorder='group'"),
        (_weights(block_structure=[2, 4]), "block_structure="),
        (_weights(new=1), "weights: not known here: new=1"),
    ],
)
def test_settings_that_are_not_read_are_named(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=f"model/config.json: quantization_config.*{message}"):
        packing_of({"quantization_config": settings}, where="model/config.json")


KIMI_IGNORES = ["re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "mxfp4"},
        {
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
            "quant_method": "mxfp4",
        },
        {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
        {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]},
        _settings("int4", ignore=["lm_head", *KIMI_IGNORES]),
        _settings("int4", ignore=[*KIMI_IGNORES, "re:.*lm_head.*", "re:vision_tower.*", "re:mm_projector.*"]),
    ],
    ids=["short", "GPT-OSS", "DeepSeek V3, R1, Kimi K2", "DeepSeek V3.1", "Kimi K2 Thinking", "Kimi K2.6"],
)
def test_what_published_models_say_is_read(settings: dict[str, Any]):
    assert packing_of({"quantization_config": settings}, where="config.json") is not None


def test_settings_may_stand_with_the_text_model():
    config = {"model_type": "outer", "text_config": {"hidden_size": 8, "quantization_config": _settings("int4")}}
    assert packing_of(config, where="config.json") is not None
    assert plain_config(config) == {"model_type": "outer", "text_config": {"hidden_size": 8}}
    assert packing_of(plain_config(config), where="config.json") is None
    assert packing_of({"quantization_config": None, "text_config": None}, where="config.json") is None


@pytest.mark.parametrize("settings", [["fp8"], "fp8", {"quant_method": ["fp8"]}])
def test_settings_that_are_none_at_all_are_named(settings: Any):
    with pytest.raises(ConfigError, match=r"config\.json: quantization_config"):
        packing_of({"quantization_config": settings}, where="config.json")
