"""Tiny checkpoints as Hugging Face lays them out, written by the safetensors library."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


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
