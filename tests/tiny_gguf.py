"""Small GGUF files, written with the gguf package."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

D, F, N, K, H, V, LAYERS = 32, 48, 4, 2, 8, 40, 2


def sizes(arch: str, **changes: Any) -> dict[str, Any]:
    """Metadata of a model of two layers; `changes` add to them, or drop a key by None. Keys: without the architecture, `__` for a dot."""
    known = {
        "block_count": LAYERS,
        "context_length": 64,
        "embedding_length": D,
        "feed_forward_length": F,
        "attention.head_count": N,
        "attention.head_count_kv": K,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10_000.0,
    }
    known |= {key.replace("__", "."): value for key, value in changes.items()}
    return {f"{arch}.{key}": value for key, value in known.items() if value is not None}


def write(path: Path, arch: str, metadata: dict[str, Any], tensors: dict[str, Any] | None = None, **options: Any) -> Path:
    """Write a file. A tensor is an array, stored as it is, or a pair of bytes u8[rows, bytes] and the name of their quantisation.

    There is an embedding of zeros unless `tensors` have another, or None for none.
    """
    writer = gguf.GGUFWriter(path, arch, **options)
    for key, value in metadata.items():
        add(writer, key, value)
    for name, tensor in {"token_embd.weight": np.zeros((V, D), np.float32), **(tensors or {})}.items():
        if tensor is None:
            continue
        array, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
        if array.dtype.name == "bfloat16":
            array, kind = array.view(np.uint8), "BF16"
        writer.add_tensor(name, array, raw_dtype=None if kind is None else gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a value in the type that converters give it: whole numbers u32 (i32 in lists), others f32."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def layer(arch: str, i: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random weights of a layer of an architecture, under the names and in the order of dimensions that GGUF has for it."""
    shapes = {
        "attn_norm": (D,),
        "attn_q": (N * H, D),
        "attn_k": (K * H, D),
        "attn_v": (K * H, D),
        "attn_output": (D, N * H),
        "ffn_norm": (D,),
        "ffn_gate": (F, D),
        "ffn_up": (F, D),
        "ffn_down": (D, F),
    }
    if arch in ("qwen3", "gemma3"):
        shapes |= {"attn_q_norm": (H,), "attn_k_norm": (H,)}
    if arch in ("gemma2", "gemma3"):
        shapes |= {"post_attention_norm": (D,), "post_ffw_norm": (D,)}
    weights = {f"blk.{i}.{name}.weight": rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    if arch == "qwen2":
        rows = {"attn_q": N * H, "attn_k": K * H, "attn_v": K * H}
        weights |= {f"blk.{i}.{name}.bias": rng.normal(size=size).astype(np.float32) for name, size in rows.items()}
    return weights


def model(arch: str, *, tied: bool = True, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights of a whole model."""
    rng = np.random.default_rng(seed)
    weights = {"token_embd.weight": rng.normal(size=(V, D)).astype(np.float32), "output_norm.weight": rng.normal(size=D).astype(np.float32)}
    if not tied:
        weights["output.weight"] = rng.normal(size=(V, D)).astype(np.float32)
    for i in range(LAYERS):
        weights |= layer(arch, i, rng)
    return weights
