"""MaxText's words for a model: a name that stands for sizes, or a kind of block with sizes of its own."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from telamon.config import presets, yamlio
from telamon.config.maxtext.settings import Settings
from telamon.errors import ConfigError


@dataclass(frozen=True)
class Block:
    """What stands for one of MaxText's kinds of decoder block."""

    family: str
    fields: Mapping[str, str]
    """MaxText's setting -> field of the family."""
    activations: tuple[str, ...] = ("silu", "linear")
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Settings of MaxText's that have one value here."""
    layers: int = 1
    """Layers in what MaxText counts as one."""
    scalar_is_head_dim: bool = False
    """Whether scores are divided by the root of the head's size, and the family has a field for that."""


def _without(table: Mapping[str, str], key: str) -> dict[str, str]:
    return {name: ours for name, ours in table.items() if name != key}


_SIZES = {
    "base_emb_dim": "d_model",
    "base_num_decoder_layers": "n_layers",
    "base_num_query_heads": "n_heads",
    "head_dim": "head_dim",
    "base_mlp_dim": "d_ff",
    "vocab_size": "vocab_size",
    "normalization_layer_epsilon": "norm_eps",
    "logits_via_embedding": "tie_embeddings",
}
_ROTARY = _SIZES | {"base_num_kv_heads": "n_kv_heads", "rope_max_timescale": "rope_theta"}
_WINDOW = _ROTARY | {"sliding_window_size": "window"}
_EXPERTS = {"num_experts": "n_experts", "num_experts_per_tok": "top_k"}
_LATENT = {
    **_without(_SIZES, "head_dim"),
    **_EXPERTS,
    "rope_max_timescale": "rope_theta",
    "base_moe_mlp_dim": "d_expert",
    "shared_experts": "n_shared",
    "first_num_dense_layers": "n_dense",
    "routed_scaling_factor": "expert_scale",
    "n_routing_groups": "n_groups",
    "topk_routing_group": "top_groups",
    "q_lora_rank": "q_rank",
    "kv_lora_rank": "kv_rank",
    "qk_nope_head_dim": "nope_dim",
    "qk_rope_head_dim": "rope_dim",
    "v_head_dim": "value_dim",
    "mtp_num_layers": "mtp_layers",
}
_PLAIN = {"use_qk_norm": False, "attention_bias": False}
_GELU = ("gelu", "linear")
_BY_SIGMOID = {"attention_type": "mla", "routed_score_func": "sigmoid", "routed_bias": True}
_BY_SOFTMAX = {"attention_type": "mla", "routed_score_func": "softmax", "routed_bias": False}

BLOCKS: dict[str, Block] = {
    "llama2": Block("llama", _ROTARY, fixed=_PLAIN),
    "mistral": Block("mistral", _ROTARY, fixed=_PLAIN),
    "gemma": Block("gemma", _ROTARY, activations=_GELU, fixed=_PLAIN),
    "gemma2": Block(
        "gemma2",
        _WINDOW | {"attn_logits_soft_cap": "attention_softcap", "final_logits_soft_cap": "final_softcap"},
        activations=_GELU,
        fixed=_PLAIN,
        layers=2,  # a sliding layer and a global one
        scalar_is_head_dim=True,
    ),
    "gemma3": Block(
        "gemma3",
        _WINDOW | {"local_rope_max_timescale": "rope_local_theta", "final_logits_soft_cap": "final_softcap"},
        activations=_GELU,
        fixed={"attention_bias": False},
        scalar_is_head_dim=True,
    ),
    "qwen2": Block("qwen2", _ROTARY, fixed={"use_qk_norm": False, "attention_bias": True}),
    "qwen3": Block("qwen3", _ROTARY, fixed={"use_qk_norm": True, "attention_bias": False}),
    "olmo3": Block(
        "olmo3",
        _WINDOW | {"inhomogeneous_layer_cycle_interval": "layer_pattern"},
        fixed={"use_qk_norm": True, "attention_bias": False},
    ),
    "gpt3": Block("gpt3", _SIZES | {"trainable_position_size": "n_positions"}, activations=("gelu",), fixed={"use_qk_norm": False}),
    "mixtral": Block("mixtral", _ROTARY | _EXPERTS | {"base_moe_mlp_dim": "d_ff"}, fixed=_PLAIN | {"routed_bias": False}),
    "qwen3_moe": Block(
        "qwen3_moe",
        _ROTARY | _EXPERTS | {"base_moe_mlp_dim": "d_expert", "norm_topk_prob": "renormalize"},
        fixed={"use_qk_norm": True, "attention_bias": False, "shared_experts": 0},
    ),
    "gpt_oss": Block(
        "gpt_oss",
        {
            **_WINDOW,
            **_EXPERTS,
            "base_moe_mlp_dim": "d_ff",
            "inhomogeneous_layer_cycle_interval": "layer_pattern",
            "mlp_activations_limit": "swiglu_limit",
            "attention_bias": "attention_bias",
        },
        activations=("sigmoid", "linear"),
        fixed={"use_qk_norm": False, "attention_sink": True, "mlp_bias": True, "routed_bias": True},
    ),
    "llama4": Block(
        "llama4",
        {
            **_ROTARY,
            **_EXPERTS,
            "base_moe_mlp_dim": "d_expert",
            "chunk_attn_window_size": "chunk",
            "nope_layer_interval": "layer_pattern",
            "interleave_moe_layer_step": "ffn_pattern",
            "use_qk_norm": "qk_norm",
            "temperature_tuning": "temperature",
            "attention_bias": "attention_bias",
        },
        fixed={"shared_experts": 1, "routed_bias": False},
    ),
    "deepseek": Block("deepseek_v3", _LATENT, fixed=_BY_SIGMOID),
}
_OTHERS = (Block("deepseek_v2", _without(_LATENT, "mtp_num_layers"), fixed=_BY_SOFTMAX), Block("kimi_k2", _LATENT, fixed=_BY_SIGMOID))
"""What MaxText has as the same kind of block as another, and tells apart by settings."""

_SPELLING: dict[str, Callable[[Any], Any]] = {
    "sliding_window_size": lambda size: size or None,
    "attn_logits_soft_cap": lambda cap: cap or None,
    "final_logits_soft_cap": lambda cap: cap or None,
    "rope_max_timescale": float,
    "local_rope_max_timescale": lambda theta: float(theta) if theta > 0 else 10_000.0,
    "inhomogeneous_layer_cycle_interval": lambda period: "S" * (period - 1) + "G",
    "chunk_attn_window_size": lambda size: size or None,
    "nope_layer_interval": lambda period: "C" * (period - 1) + "N" if period > 0 else "C",
    "interleave_moe_layer_step": lambda period: "D" * (period - 1) + "M",
    "temperature_tuning": lambda tuned: {"scale": 0.1, "floor": 8192} if tuned else None,  # MaxText's constants
    "mlp_activations_limit": lambda limit: limit if limit > 0 else None,
    "q_lora_rank": lambda rank: rank or None,
    "n_routing_groups": lambda groups: max(groups, 1),
    "topk_routing_group": lambda groups: max(groups, 1),
}


def model_section(settings: Settings) -> dict[str, Any]:
    """The `model` section of a run.

    Raises:
        ConfigError: the architecture is not in this version, or is not one of MaxText's.
    """
    name = settings["model_name"]
    section = _own_sizes(settings) if name == "default" else _named(settings, str(name))
    if settings.given("max_position_embeddings"):
        section["max_positions"] = settings["max_position_embeddings"]
    _scale(settings, section)
    return section


def _named(settings: Settings, name: str) -> dict[str, Any]:
    """A preset, and the sizes that somebody gave on top."""
    table = _models()
    if name not in table["presets"]:
        if name in table["others"]:
            raise ConfigError(f"model_name={name}: this architecture is not in this version; see `telamon models list` for those that are")
        near = get_close_matches(name, [*table["presets"], *table["others"]], 1)
        raise ConfigError(f"model_name={name} is not a model of MaxText's" + (f"; did you mean {near[0]}?" if near else ""))
    preset = table["presets"][name]
    sizes = yamlio.read(presets.find("models", preset))
    block = next(block for block in (*BLOCKS.values(), *_OTHERS) if block.family == sizes["family"])
    for beginning, difference in table["differences"].items():
        if name.startswith(beginning):
            settings.note("model_name", difference)
    settings.assume(table["settings"].get(name, {}))
    section: dict[str, Any] = {"preset": preset}
    for key, ours in block.fields.items():
        if not settings.spoken(key) and not settings.given(key):
            continue
        value = _spelt(block, key, settings[key])
        if value == sizes.get(ours):
            continue
        if settings.spoken(key):
            section[ours] = value
        else:
            settings.note(key, f"model_name={name} decides it, as in MaxText; a word {key}={settings[key]} on the command line would count")
    if settings.spoken("rope_type") or settings.spoken("rope_linear_scaling_factor"):
        section["rope_scaling"] = _rope_scaling(settings, latent="kv_rank" in sizes)
    _check_fixed(settings, block, of_name=True)
    return section


def _own_sizes(settings: Settings) -> dict[str, Any]:
    """A family, and all sizes as MaxText has them."""
    kind = str(settings["decoder_block"])
    if kind not in BLOCKS:
        raise ConfigError(f"decoder_block={kind} is not in this version; those that are: {', '.join(BLOCKS)}")
    block = BLOCKS[kind]
    if kind == "deepseek" and settings["routed_score_func"] != "sigmoid":
        block = _OTHERS[0]
    section: dict[str, Any] = {"family": block.family}
    section |= {ours: _spelt(block, key, settings[key]) for key, ours in block.fields.items()}
    width = block.fields.get("base_moe_mlp_dim")
    if width is not None and settings["base_moe_mlp_dim"] < 1:
        section[width] = settings["base_mlp_dim"]
    if "rope_theta" in section:
        section["rope_scaling"] = _rope_scaling(settings, latent="kv_rank" in section)
    if block.scalar_is_head_dim:
        section["query_pre_attn_scalar"] = float(section["head_dim"])
    _check_fixed(settings, block, of_name=False)
    if settings["normalize_embedding_logits"] and section["tie_embeddings"]:
        settings.note("normalize_embedding_logits", "logits of a shared table are not divided by the root of the width here")
    if "n_kv_heads" not in section and settings["base_num_kv_heads"] != section["n_heads"]:
        settings.note("base_num_kv_heads", f"every head of {block.family} has keys and values of its own")
    return section


def _spelt(block: Block, key: str, value: Any) -> Any:
    if key == "base_num_decoder_layers":
        return value * block.layers
    return _SPELLING.get(key, lambda same: same)(value)


def _check_fixed(settings: Settings, block: Block, *, of_name: bool) -> None:
    """Note what this family has no choice of. A model that goes by its name has those of MaxText's own file, unless a word says otherwise."""
    for key, value in {**block.fixed, "mlp_activations": list(block.activations)}.items():
        if (settings.spoken(key) or not of_name) and settings[key] != value:
            settings.note(key, f"{block.family} always has {value}")


def _rope_scaling(settings: Settings, *, latent: bool) -> dict[str, Any] | None:
    """The stretch of rotary positions; with latent attention, YaRN is in the scale of scores as well."""
    kind = settings["rope_type"]
    if kind == "llama3.1":
        # MaxText's constants; its settings have no say in them.
        llama = {"kind": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_length": 8192}
        return llama if settings["rope_use_scale"] else None
    if kind == "yarn":
        sharpened = {"mscale": settings["mscale"], "mscale_all_dim": settings["mscale"]} if latent else {}
        return sharpened | {
            "kind": "yarn",
            "factor": float(settings["rope_factor"]),
            "original_length": settings["original_max_position_embeddings"],
            "beta_fast": float(settings["beta_fast"]),
            "beta_slow": float(settings["beta_slow"]),
            "truncate": settings["rope_truncate"],
            "attention_factor": None if settings["rope_attention_scaling"] else 1.0,
        }
    factor = settings["rope_linear_scaling_factor"]
    return None if factor == 1 else {"kind": "linear", "factor": float(factor)}


def _scale(settings: Settings, section: dict[str, Any]) -> None:
    """Apply MaxText's `global_parameter_scale`, a power of two that it spreads over heads, widths and depth."""
    scale = settings["global_parameter_scale"]
    if scale == 1:
        return
    if not isinstance(scale, int) or scale < 1 or scale & (scale - 1):
        raise ConfigError(f"global_parameter_scale={scale} is not a power of two")
    base, rest = divmod(int(math.log2(scale)), 3)
    powers = {"d_model": base + (rest > 1), "n_layers": base} | dict.fromkeys(
        ("n_heads", "n_kv_heads", "d_ff", "d_expert"), base + (rest > 0)
    )
    sizes = (yamlio.read(presets.find("models", section["preset"])) if "preset" in section else {}) | section
    section |= {name: sizes[name] * 2**power for name, power in powers.items() if name in sizes}


@functools.cache
def _models() -> dict[str, Any]:
    return yamlio.read(presets.ROOT / "maxtext" / "models.yml")
