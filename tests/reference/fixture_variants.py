"""The table of fixtures: one tiny model per family, and beside it one more for each option, switched on alone.

Sizes are chosen so that no two dimensions that could be confused are equal, and constants (theta, epsilon, scales) so that
none is a default that an importer could guess. `without` lists settings that must be seen in the logits: making the model
again with one of them undone has to move some logit.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from older_configs import older

Options = dict[str, Any]

LINEAR: Options = {"rope_type": "linear", "factor": 4.0}
# With 16 features the wavelengths are 6, 32, 167, 862, ...: the first two are kept, the third lies between, the rest is scaled.
LLAMA3: Options = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN: Options = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024}

DENSE: Options = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-2,
}
PLAIN_EPS: Options = {"rms_norm_eps": 1e-6}


def rope(theta: float, **scaling: Any) -> Options:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **scaling}}


@dataclass(frozen=True)
class Variant:
    """A fixture to make."""

    name: str
    exercises: str
    config: str
    """Class of the config in transformers."""
    options: Options
    without: tuple[Options, ...] = ()
    """Changes of the config, each of which must move a logit."""
    dtype: str = "float32"
    """Of the stored weights; the outputs are always computed in float32, from the weights as stored."""
    shards: int = 1
    weights_of: str | None = None
    """Name of the fixture whose weights these are."""
    spelling: Callable[[Options], Options] | None = None
    """Writes config.json as files from before transformers 5 have it; the outputs are then those of `weights_of`."""
    plain_rope_on_sliding_layers: bool = False
    offsets: tuple[int, ...] = (0, 7, 100, 4095)
    jumps: tuple[int, ...] = (0, 1, 7, 100, 101, 1000, 4094, 4095)
    renamed: dict[str, str] = field(default_factory=dict)
    """Prefixes of names in memory, and what the file has for them."""


def _llama(
    name: str, exercises: str, without: tuple[Options, ...] = (), *, theta: float = 5e5, scaling: Options | None = None, **changes: Any
) -> Variant:
    """Grouped queries, untied, theta 500000."""
    how = {key: changes.pop(key) for key in ("dtype", "shards", "weights_of", "spelling") if key in changes}
    return Variant(f"llama-{name}", exercises, "LlamaConfig", {**DENSE, **rope(theta, **(scaling or {})), **changes}, without, **how)


def _llama_scaled(name: str, exercises: str, scaling: Options, *without: Options, **how: Any) -> Variant:
    """Heads of 16 features, enough for every band of a scaling."""
    return _llama(name, exercises, (rope(5e5), *without), scaling=scaling, num_attention_heads=2, num_key_value_heads=1, head_dim=16, **how)


def _scaled(scaling: Options, **changes: Any) -> Options:
    return rope(5e5, **{**scaling, **changes})


LLAMA = [
    _llama("gqa", "grouped queries, untied head", (PLAIN_EPS, rope(1e4))),
    _llama("tied-odd", "tied head, an odd number of layers", tie_word_embeddings=True, num_hidden_layers=3),
    _llama("mha", "as many kv heads as query heads", num_key_value_heads=4),
    _llama("mqa", "one kv head", num_key_value_heads=1),
    _llama("biases", "biases on all linears of attention and MLP", attention_bias=True, mlp_bias=True),
    _llama("head-dim", "heads wider than D/N", head_dim=16),
    _llama_scaled("linear", "linear rope scaling", LINEAR),
    _llama_scaled("llama3", "llama3 rope scaling, all three bands", LLAMA3),
    _llama_scaled("llama3-no-middle", "llama3 rope scaling with low = high", {**LLAMA3, "high_freq_factor": 1.0}, _scaled(LLAMA3)),
    _llama_scaled("yarn", "YaRN, everything by default", YARN, _scaled(YARN, attention_factor=1.0), _scaled(YARN, beta_fast=4.0)),
    _llama_scaled("yarn-attention-factor", "YaRN with its attention factor given", {**YARN, "attention_factor": 0.8}, _scaled(YARN)),
    _llama_scaled("yarn-no-truncate", "YaRN, bounds of the ramp not rounded", {**YARN, "truncate": False}, _scaled(YARN)),
    _llama_scaled(
        "yarn-mscale",
        "YaRN with mscale and mscale_all_dim",
        {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
        _scaled(YARN),
        _scaled(YARN, attention_factor=1.0),
    ),
    _llama("bf16", "weights in bfloat16", dtype="bfloat16"),
    _llama("shards", "three safetensors shards with an index", shards=3),
    _llama_scaled("llama3-older", "llama3 rope scaling in the older spelling", LLAMA3, weights_of="llama-llama3", spelling=older()),
    _llama_scaled(
        "linear-older", "linear scaling spelt with `type`", LINEAR, weights_of="llama-linear", spelling=older(scaling_key="type")
    ),
]

VARIANTS = {variant.name: variant for variant in LLAMA}
