"""Tiny models, runs and batches that tests of the model and of training share."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from telamon.config.schema import OptimizerConfig, RunConfig, TrainConfig
from telamon.models.decoder import Decoder, Numerics
from telamon.models.dense import DenseSizes
from telamon.models.llama import LlamaConfig
from telamon.models.mixtral import MixtralConfig
from telamon.models.olmo import Olmo2Config
from telamon.models.qwen3 import Qwen3Config
from telamon.models.weights import Model, WeightInfo, Weights

SIZES: dict[str, Any] = {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "d_ff": 48}

INDIVISIBLE: dict[str, Any] = {"vocab_size": 62, "d_model": 36, "head_dim": 6, "d_ff": 44}
"""Sizes of which none is a multiple of 8."""

Rows = Sequence[Sequence[int]]


def sizes(family: str = "llama", **changes: Any) -> DenseSizes:
    """Sizes of a tiny model."""
    families = {"llama": LlamaConfig, "mixtral": MixtralConfig, "olmo2": Olmo2Config, "qwen3": Qwen3Config}
    return families[family](**{**SIZES, **changes})


def model(family: str = "llama", *, numerics: Numerics | None = None, **changes: Any) -> Model:
    """A tiny model."""
    return Model(sizes(family, **changes).spec(), numerics)


def run(*, family: str = "llama", model: dict[str, Any] | None = None, optimizer: Any = None, **train: Any) -> RunConfig:
    """A run of a tiny model in float32: 20 steps of 8 rows of 16 tokens, unless told otherwise."""
    settings = {"steps": 20, "batch_size": 8, "seq_len": 16, "compute_dtype": "float32", "loss_chunk": 32, **train}
    return RunConfig(model=sizes(family, **(model or {})), train=TrainConfig(**settings), optimizer=optimizer or OptimizerConfig())


def weights(model: Model, *, seed: int = 1) -> Weights:
    """Random weights from NumPy, which takes no compilation; scales and biases differ from 1 and 0, so that none goes unseen."""
    rng = np.random.default_rng(seed)

    def value(info: WeightInfo) -> jax.Array:
        size = 0.3 if info.matrix is None else math.prod(info.shape[dim] for dim in info.matrix[0]) ** -0.5
        return jnp.asarray(size * rng.standard_normal(info.shape) + (info.matrix is None), jnp.float32)

    return model.map_info(value)


def logits(decoder: Decoder, batch: Mapping[str, Any]) -> jax.Array:
    """Logits [B, T, V] of a batch, whatever else it holds."""
    return decoder.logits(decoder(batch["tokens"], positions=batch["positions"], segments=batch["segments"]).hidden)


def batch(documents: Rows, *, length: int, seed: int = 0, vocab: int = 64) -> dict[str, Any]:
    """Rows of random documents of the given lengths, packed from the left and padded on the right.

    Every token but a document's last has a target; each stands for 1 to 4 bytes.
    """
    rng = np.random.default_rng(seed)
    B = len(documents)
    out: dict[str, Any] = {name: np.zeros((B, length), np.int32) for name in ("tokens", "targets", "segments", "positions", "bytes")}
    out["mask"] = np.zeros((B, length), np.float32)
    for row, lengths in enumerate(documents):
        start = 0
        for number, size in enumerate(lengths, 1):
            put(out, row=row, start=start, ids=rng.integers(0, vocab, size), segment=number)
            out["bytes"][row, start : start + size] = rng.integers(1, 5, size)
            start += size
    return out


def put(out: dict[str, Any], *, row: int, start: int, ids: np.ndarray, segment: int) -> None:
    """Write one document into a row."""
    size = len(ids)
    out["tokens"][row, start : start + size] = ids
    out["targets"][row, start : start + size - 1] = ids[1:]
    out["mask"][row, start : start + size - 1] = 1
    out["segments"][row, start : start + size] = segment
    out["positions"][row, start : start + size] = np.arange(size)
