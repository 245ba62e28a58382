"""config.json as transformers before version 5 wrote it, which is what most checkpoints on the Hub have."""

from collections.abc import Callable
from typing import Any

Config = dict[str, Any]


def older(*, scaling_key: str = "rope_type", omit: tuple[str, ...] = (), **extra: Any) -> Callable[[Config], Config]:
    """`torch_dtype` for `dtype`, `rope_theta` and `rope_scaling` for `rope_parameters`, no `layer_types` nor what `omit` names; `extra` overrides."""

    def spell(config: Config) -> Config:
        kept = _common({key: value for key, value in config.items() if key not in omit})
        parameters = dict(config["rope_parameters"])
        return _sorted({**kept, "rope_theta": parameters.pop("rope_theta"), "rope_scaling": _scaling(parameters, scaling_key), **extra})

    return spell


def older_gemma3(config: Config) -> Config:
    """Gemma 3: flat rope attributes of which `rope_scaling` concerns global layers only, and the pattern as one number."""
    by_type = {name: dict(parameters) for name, parameters in config["rope_parameters"].items()}
    kept = _common({key: value for key, value in config.items() if key not in {"_sliding_window_pattern", "tie_word_embeddings"}})
    return _sorted(
        {
            **kept,
            "rope_theta": by_type["full_attention"].pop("rope_theta"),
            "rope_local_base_freq": by_type["sliding_attention"]["rope_theta"],
            "rope_scaling": _scaling(by_type["full_attention"], "rope_type"),
            "sliding_window_pattern": config["_sliding_window_pattern"],
            "cache_implementation": "hybrid",
        }
    )


def older_gpt_oss(config: Config) -> Config:
    """GPT-OSS: the names that OpenAI's own files have beside transformers'."""
    original = config["rope_parameters"]["original_max_position_embeddings"]
    both = {"experts_per_token": config["num_experts_per_tok"], "initial_context_length": original}
    return older(omit=("layer_types",), layer_types=config["layer_types"], rope_scaling=_scaling_of(config), **both)(config)


def older_deepseek(**extra: Any) -> Callable[[Config], Config]:
    """DeepSeek and Kimi: scaling spelt with `type`, and the attributes of training and of remote code that the Hub's files carry."""
    carried = {"aux_loss_alpha": 0.001, "seq_aux": True, "moe_layer_freq": 1, "ep_size": 1, "pretraining_tp": 1}
    remote = {"AutoConfig": "configuration_deepseek.DeepseekV3Config", "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}
    omit = ("head_dim", "qk_head_dim", "rope_interleave", "mlp_bias")
    return older(scaling_key="type", omit=omit, auto_map=remote, **carried, **extra)


def _scaling_of(config: Config) -> Config | None:
    return _scaling({key: value for key, value in config["rope_parameters"].items() if key != "rope_theta"}, "rope_type")


def _common(config: Config) -> Config:
    renamed = {"torch_dtype": config["dtype"], "transformers_version": "4.50.0"}
    newer = {"dtype", "rope_parameters", "layer_types", "use_bidirectional_attention"}
    return {key: value for key, value in config.items() if key not in newer} | renamed


def _scaling(parameters: Config, key: str) -> Config | None:
    kind = parameters.pop("rope_type")
    return None if kind == "default" else {**parameters, key: kind}


def _sorted(config: Config) -> Config:
    return dict(sorted(config.items()))
