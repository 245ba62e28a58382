"""Tiny checkpoints as Hugging Face lays them out, written by the safetensors library."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file


def write_folder(folder: Path, tensors: Mapping[str, np.ndarray], config: dict, *, shards: int = 1) -> Path:
    """A folder of one file, or of shards with an index; tensors go to the shards in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = list(tensors)
    files = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(files.values())):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file, metadata={"format": "pt"})
    write_index(folder, files)
    return folder


def write_index(folder: Path, files: Mapping[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": dict(files)}))


def write_raw(path: Path, header: object, data: bytes = b"") -> None:
    """A safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def llama_config(**changes) -> dict:
    """config.json of a Llama of 2 layers, width 32 and 96 tokens."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
        **changes,
    }


def llama_tensors(dtype: Any = np.float32, seed=0, *, layers=2, vocabulary=96) -> dict[str, np.ndarray]:
    """Random weights for `llama_config`."""
    rng = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (vocabulary, 32), "model.norm.weight": (32,), "lm_head.weight": (vocabulary, 32)}
    for layer in range(layers):
        sizes = {
            "self_attn.q_proj": (32, 32),
            "self_attn.k_proj": (16, 32),
            "self_attn.v_proj": (16, 32),
            "self_attn.o_proj": (32, 32),
            "mlp.gate_proj": (48, 32),
            "mlp.up_proj": (48, 32),
            "mlp.down_proj": (32, 48),
            "input_layernorm": (32,),
            "post_attention_layernorm": (32,),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in sizes.items()}
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def read_folder(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder, by the safetensors library."""
    return {name: array for file in sorted(folder.glob("*.safetensors")) for name, array in load_file(file).items()}
