"""Make `packed/`: weights in few bits, and what the libraries that define the formats make of them.

Runs in the environment of `make_fixtures.py`, with compressed-tensors in it besides:

    ENV/bin/pip install compressed-tensors==0.20.1
    ENV/bin/python tests/reference/make_packed.py
"""
# pyright: reportMissingImports=false

import hashlib
import json
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationScheme
from fixture_controls import router_margin
from fixture_experts import BUFFERS, Unlucky, file_tensors
from fixture_mixtures import MIXTURES
from fixture_outputs import logits, token_rows
from fixture_variants import Variant
from make_fixtures import VERSIONS, build, randomize
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

PACKED = Path(__file__).parent / "packed"
Tensors = dict[str, torch.Tensor]

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]}
INT4_WEIGHTS = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": 32,
    "num_bits": 4,
    "observer": "minmax",
    "observer_kwargs": {},
    "strategy": "group",
    "symmetric": True,
    "type": "int",
}


def fp8_config(block: tuple[int, int]) -> dict[str, Any]:
    return {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": list(block)}


def int4_config(group: int) -> dict[str, Any]:
    """As Kimi K2 Thinking's file has it."""
    settings = {"input_activations": None, "output_activations": None, "targets": ["Linear"]}
    return {
        "config_groups": {"group_0": {**settings, "weights": {**INT4_WEIGHTS, "group_size": group}}},
        "format": "pack-quantized",
        "global_compression_ratio": None,
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def from_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[E, I, O]."""
    return convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)


def from_fp8(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """[O, I]. transformers refuses partial blocks, so that they are filled up for it and what they are filled with is cut off."""
    rows, columns = scales.shape[0] * block[0], scales.shape[1] * block[1]
    whole = torch.zeros(rows, columns, dtype=torch.uint8)
    whole[: codes.shape[0], : codes.shape[1]] = codes.view(torch.uint8)
    out = Fp8Dequantize(None)._dequantize_one(whole.view(torch.float8_e4m3fn), scales, output_dtype=torch.bfloat16)
    return out[: codes.shape[0], : codes.shape[1]].contiguous()


def from_int4(tensors: Tensors, group: int) -> torch.Tensor:
    """[O, I]."""
    scheme = QuantizationScheme(targets=["Linear"], weights={**INT4_WEIGHTS, "group_size": group})
    return PackedQuantizationCompressor.decompress(tensors, scheme)["weight"].to(torch.bfloat16)


def main() -> None:
    torch.manual_seed(20)
    torch.set_num_threads(1)
    shutil.rmtree(PACKED, ignore_errors=True)
    for name, make in {"mxfp4": _mxfp4_codes, "fp8": _fp8_codes, "int4": _int4_codes}.items():
        folder = PACKED / f"codes-{name}"
        config, stored, expected = make()
        _write(folder, config, stored)
        save_file(expected, folder / "unpacked.safetensors")
    for name, (variant, config, pack) in MODELS.items():
        _model(name, variant, config, pack)
    for folder in sorted(PACKED.iterdir()):
        print(f"{folder.name:20} {sum(file.stat().st_size for file in folder.iterdir()) / 1e3:6.0f} kB")


def _write(folder: Path, config: dict[str, Any], stored: Tensors, **more: Any) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    versions = VERSIONS | {"compressed-tensors": version("compressed-tensors")}
    (folder / "meta.json").write_text(json.dumps({"versions": versions, **more}, indent=2) + "\n")
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors", metadata={"format": "pt"})


def _sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def _mxfp4_codes() -> tuple[dict[str, Any], Tensors, Tensors]:
    """Every byte, and every scale but the one that stands for no number."""
    blocks = torch.randint(0, 256, (4, 32, 2, 16), dtype=torch.uint8)
    blocks[0, :8] = torch.arange(256, dtype=torch.uint8).view(8, 2, 16)
    scales = torch.arange(256, dtype=torch.uint8).view(4, 32, 2)
    scales[3, 31, 1] = 127
    name = "model.layers.0.mlp.experts.down_proj"
    stored = {f"{name}_blocks": blocks, f"{name}_scales": scales}
    return {"model_type": "gpt_oss", "quantization_config": MXFP4}, stored, {name: from_mxfp4(blocks, scales)}


def _fp8_codes() -> tuple[dict[str, Any], Tensors, Tensors]:
    """Every number, in whole and partial blocks; factors to infinity, below the least normal number, and powers of two."""
    block = (16, 8)
    numbers = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
    extreme = torch.tensor([1.0, 3e38, 1e-38, 1e-45, 0.0, -2.5, 7e-41, 1e36, 0.1])
    stored, expected = {}, {}
    for name, shape, powers in [
        ("whole", (32, 16), False),
        ("partial", (37, 21), False),
        ("small", (3, 5), False),
        ("powers", (37, 21), True),
    ]:
        codes = numbers[torch.randint(0, len(numbers), shape)]
        codes.flatten()[: len(numbers)] = numbers[: codes.numel()]
        counts = tuple(-(-size // step) for size, step in zip(shape, block, strict=True))
        scales = extreme[torch.arange(counts[0] * counts[1]) % len(extreme)].view(counts)
        if powers:
            scales = torch.tensor([0, 1, 64, 126, 127, 128, 200, 253, 254], dtype=torch.uint8).view(counts).view(torch.float8_e8m0fnu)
        full = f"model.layers.0.{name}.weight"
        stored |= {full: codes.view(torch.float8_e4m3fn), f"{full}_scale_inv": scales}
        expected[full] = from_fp8(stored[full], scales, block)
    return {"model_type": "deepseek_v3", "quantization_config": fp8_config(block)}, stored, expected


def _int4_codes() -> tuple[dict[str, Any], Tensors, Tensors]:
    """Every code; factors to infinity, below the least normal number, zero and negative."""
    extreme = torch.tensor([1.0, 3e38, 1e-38, 1e-40, 0.0, -2.5, 0.1, 1e36]).to(torch.bfloat16)
    stored, expected = {}, {}
    for name, (rows, columns) in {"one": (5, 32), "more": (16, 96)}.items():
        codes = torch.randint(-8, 8, (rows, columns)).to(torch.int8)
        codes[0, :16] = torch.arange(-8, 8)
        scales = extreme[torch.arange(rows * columns // 32) % len(extreme)].view(rows, columns // 32)
        full = f"model.layers.1.mlp.experts.{name}.weight"
        packed = {"weight_packed": pack_to_int32(codes, 4), "weight_scale": scales, "weight_shape": torch.tensor([rows, columns])}
        stored |= {full.removesuffix("weight") + part: tensor for part, tensor in packed.items()}
        expected[full] = from_int4(packed, 32)
    return {"model_type": "kimi_k2", "quantization_config": int4_config(32)}, stored, expected


def _pack_mxfp4(name: str, value: torch.Tensor) -> tuple[Tensors, torch.Tensor] | None:
    """Experts [E, I, O] of GPT-OSS."""
    if not name.endswith(("gate_up_proj", "down_proj")):
        return None
    blocks = value.transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = (blocks.abs().amax(-1) / 6).log2().ceil()
    nearest = (blocks / exponents.exp2()[..., None]).unsqueeze(-1) - torch.tensor(FP4_VALUES)
    codes = nearest.abs().argmin(-1).to(torch.uint8)
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
    scales = (exponents + 127).to(torch.uint8)
    return {f"{name}_blocks": packed, f"{name}_scales": scales}, from_mxfp4(packed, scales)


FP8_BLOCK = (16, 12)


def _pack_fp8(name: str, value: torch.Tensor) -> tuple[Tensors, torch.Tensor] | None:
    """Every matrix but the tables and routers."""
    if value.ndim != 2 or "embed_tokens" in name or "lm_head" in name or name.endswith("mlp.gate.weight"):
        return None
    high, wide = FP8_BLOCK
    scales = torch.stack([torch.stack([part.abs().amax() / 448 for part in rows.split(wide, 1)]) for rows in value.split(high, 0)])
    spread = scales.repeat_interleave(high, 0)[: len(value)].repeat_interleave(wide, 1)[:, : value.shape[1]]
    codes = (value / spread).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale_inv": scales}, from_fp8(codes, scales, FP8_BLOCK)


INT4_GROUP = 16


def _pack_int4(name: str, value: torch.Tensor) -> tuple[Tensors, torch.Tensor] | None:
    """Routed experts."""
    if ".mlp.experts." not in name:
        return None
    groups = value.unflatten(-1, (-1, INT4_GROUP))
    scales = (groups.abs().amax(-1) / 7.5).to(torch.bfloat16)
    codes = (groups / scales.float()[..., None]).round().clamp(-8, 7).to(torch.int8).flatten(1)
    packed = {"weight_packed": pack_to_int32(codes, 4), "weight_scale": scales, "weight_shape": torch.tensor(value.shape)}
    return {name.removesuffix("weight") + part: tensor for part, tensor in packed.items()}, from_int4(packed, INT4_GROUP)


Pack = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor] | None]


def _changed(name: str, **options: Any) -> Variant:
    variant = MIXTURES[name]
    return Variant(name, "", variant.config, {**variant.options, "num_hidden_layers": 2, **options}, dtype="bfloat16", expert_gain=2.0)


MODELS: dict[str, tuple[Variant, dict[str, Any], Pack]] = {
    "gpt-oss": (_changed("gpt-oss", intermediate_size=32), MXFP4, _pack_mxfp4),
    "deepseek-v3": (_changed("deepseek-v3"), fp8_config(FP8_BLOCK), _pack_fp8),
    "kimi-k2": (_changed("kimi-k2", moe_intermediate_size=16), int4_config(INT4_GROUP), _pack_int4),
}


@torch.no_grad()
def _model(name: str, variant: Variant, settings: dict[str, Any], pack: Pack) -> None:
    """A whole model whose weights are the unpacked ones, and what it answers."""
    for seed in range(20, 80):
        torch.manual_seed(seed)
        model = build(variant)
        randomize(model, variant)
        state = model.state_dict()
        stored = {key: buffer.clone() for key, buffer in model.named_buffers() if key.endswith(BUFFERS)}
        unpacked = dict(stored)
        for key, piece in file_tensors(model, variant).items():
            tensor = piece.of(state[piece.parameter])
            packed, value = pack(key, tensor) or ({key: tensor.to(torch.bfloat16)}, tensor.to(torch.bfloat16))
            tensor.copy_(value)
            stored |= packed
            unpacked[key] = value
        rows = token_rows(model, variant)
        try:
            margin = router_margin(model, rows)
        except Unlucky:
            continue
        break
    else:
        raise AssertionError(f"no seed will do for {name}")
    config = json.loads(model.config.to_json_string()) | {"quantization_config": settings, "architectures": [type(model).__name__]}
    config["model_type"] = MIXTURES[name].model_type or config["model_type"]
    folder = PACKED / name
    _write(folder, config, stored, seed=seed, router_margin=margin, sha256={key: _sha256(tensor) for key, tensor in unpacked.items()})
    np.savez_compressed(folder / "expected.npz", ids=rows["ids"], logits=logits(model, torch.from_numpy(rows["ids"])).numpy())


if __name__ == "__main__":
    main()
