"""Attributes of Hugging Face's config.json from the metadata of a GGUF file.

What a file leaves out and every program that reads GGUF knows by heart (llama.cpp, `src/llama-model.cpp`) is written down here: the rotary base
of Llama and of Gemma 1 and 2, the pattern of windows and the local rotary base of Gemma, and the query scale of Gemma's 27b, told by depth.
"""

from collections.abc import Callable, Mapping
from math import pi
from typing import TYPE_CHECKING, Any

from telamon.errors import ConfigError
from telamon.hub.gguf_metadata import Metadata
from telamon.hub.gguf_names import ROPE_FACTORS

if TYPE_CHECKING:
    import numpy as np

_HARMLESS = ("vocab_size", "rope.scaling.finetuned")
"""The embedding's rows say the first; the second tells how a model was made."""
_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62
_DEFAULT_THETA = 10_000.0


def hf_config(meta: Metadata, shapes: Mapping[str, tuple[int, ...]], rope_factors: "np.ndarray | None") -> dict[str, Any]:
    """The config.json of the model in a file whose tensors have `shapes`, with rotary divisors f32[H/2] where it has them.

    Raises ConfigError, which names the key, where metadata that change numbers are missing, unknown or not supported.
    """
    arch = meta.need("general.architecture", str)
    config = _common(meta, arch, shapes) | _FAMILIES[arch](meta, shapes)
    scaling = _rope_scaling(meta, arch)
    if rope_factors is not None:
        scaling = _llama3_scaling(meta, rope_factors, config, scaling)
    config["rope_scaling"] = scaling
    for name in ("bos", "eos"):
        token = meta.get(f"tokenizer.ggml.{name}_token_id", int, None)
        if token is not None:
            config[f"{name}_token_id"] = token
    meta.refuse_unused(f"{arch}.", _HARMLESS)
    return config


def _common(meta: Metadata, arch: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    width, heads = meta.need(f"{arch}.embedding_length", int), meta.need(f"{arch}.attention.head_count", int)
    key_length = f"{arch}.attention.key_length"
    head_dim = meta.need(key_length, int) if key_length in meta or not heads or width % heads else width // heads
    for key in ("attention.value_length", "rope.dimension_count"):
        meta.expect(f"{arch}.{key}", head_dim, "queries, keys, values and rotation have one width")
    meta.expect(f"{arch}.attention.causal", True, "models that see later tokens are not supported")
    for key in ("expert_count", "expert_used_count"):
        meta.expect(f"{arch}.{key}", 0, "mixtures of experts are not read from GGUF")
    return {
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": width,
        "intermediate_size": meta.need(f"{arch}.feed_forward_length", int),
        "num_hidden_layers": meta.need(f"{arch}.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get(f"{arch}.attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "max_position_embeddings": meta.need(f"{arch}.context_length", int),
        "rms_norm_eps": meta.need(f"{arch}.attention.layer_norm_rms_epsilon", float),
        "tie_word_embeddings": "output.weight" not in shapes,
    }


def _llama(meta: Metadata, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Llama, or Mistral where the file speaks of a window; converters of Mistral 7B v0.1 leave its window out, and so is it read."""
    own = {"hidden_act": "silu", "rope_theta": meta.get("llama.rope.freq_base", float, _DEFAULT_THETA)}
    window = meta.get("llama.attention.sliding_window", int, 0)
    if window:
        return own | _is("mistral", "MistralForCausalLM") | {"sliding_window": window}
    biases = {"attention_bias": "blk.0.attn_q.bias" in shapes, "mlp_bias": "blk.0.ffn_up.bias" in shapes}
    return own | _is("llama", "LlamaForCausalLM") | biases


def _qwen2(meta: Metadata, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    own = {"hidden_act": "silu", "use_sliding_window": False, "rope_theta": meta.need("qwen2.rope.freq_base", float)}
    return own | _is("qwen2", "Qwen2ForCausalLM")


def _qwen3(meta: Metadata, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    own = {"hidden_act": "silu", "use_sliding_window": False, "rope_theta": meta.need("qwen3.rope.freq_base", float)}
    return own | _is("qwen3", "Qwen3ForCausalLM") | {"attention_bias": "blk.0.attn_q.bias" in shapes}


def _gemma(meta: Metadata, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    own = {"hidden_act": "gelu_pytorch_tanh", "rope_theta": meta.get("gemma.rope.freq_base", float, _DEFAULT_THETA)}
    return own | _is("gemma", "GemmaForCausalLM") | {"attention_bias": False}


def _gemma2(meta: Metadata, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    return _is("gemma2", "Gemma2ForCausalLM") | {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "rope_theta": meta.get("gemma2.rope.freq_base", float, _DEFAULT_THETA),
        "attn_logit_softcapping": meta.need("gemma2.attn_logit_softcapping", float),
        "final_logit_softcapping": meta.need("gemma2.final_logit_softcapping", float),
        "query_pre_attn_scalar": _query_scalar(meta, "gemma2", _GEMMA2_27B_LAYERS),
        "sliding_window": meta.need("gemma2.attention.sliding_window", int),
        "layer_types": _layer_types(meta, "gemma2", period=2),
    }


def _gemma3(meta: Metadata, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    return _is("gemma3_text", "Gemma3ForCausalLM") | {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "rope_theta": meta.need("gemma3.rope.freq_base", float),
        "rope_local_base_freq": meta.get("gemma3.rope.freq_base_swa", float, _DEFAULT_THETA),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": meta.get("gemma3.final_logit_softcapping", float, None),
        "query_pre_attn_scalar": _query_scalar(meta, "gemma3", _GEMMA3_27B_LAYERS),
        "sliding_window": meta.need("gemma3.attention.sliding_window", int),
        "layer_types": _layer_types(meta, "gemma3", period=6),
    }


_FAMILIES: dict[str, Callable[[Metadata, Mapping[str, tuple[int, ...]]], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}


def _is(model_type: str, architecture: str) -> dict[str, Any]:
    return {"model_type": model_type, "architectures": [architecture]}


def _query_scalar(meta: Metadata, arch: str, layers_of_27b: int) -> int:
    """What a query is divided by the root of: D/N in the 27b models, which GGUF does not say, H in all others."""
    heads, width = meta.need(f"{arch}.attention.head_count", int), meta.need(f"{arch}.embedding_length", int)
    if meta.need(f"{arch}.block_count", int) == layers_of_27b:
        return width // heads
    return meta.get(f"{arch}.attention.key_length", int, width // heads)


def _layer_types(meta: Metadata, arch: str, period: int) -> list[str]:
    """Every `period`-th layer sees all tokens; a newer file may give the period, or say for each layer whether it has the window."""
    key, layers = f"{arch}.attention.sliding_window_pattern", meta.need(f"{arch}.block_count", int)
    pattern = meta.get(key, object, period)
    if isinstance(pattern, int) and pattern > 0:
        pattern = [(i + 1) % pattern != 0 for i in range(layers)]
    if not isinstance(pattern, list) or len(pattern) != layers:
        raise ConfigError(f"{meta.path}: the metadata {key} is {pattern!r}, neither a period nor a list for each of the {layers} layers")
    return ["sliding_attention" if windowed else "full_attention" for windowed in pattern]


def _rope_scaling(meta: Metadata, arch: str) -> dict[str, Any] | None:
    prefix = f"{arch}.rope.scaling"
    kind = meta.get(f"{prefix}.type", str, "none")
    if kind == "none":
        meta.expect(f"{prefix}.factor", 1.0, f"there is no {prefix}.type that says what the factor is for")
        factor = meta.get(f"{arch}.rope.scale_linear", float, 1.0)  # how files of 2023 spell it
        return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    if kind == "linear":
        return {"rope_type": "linear", "factor": meta.need(f"{prefix}.factor", float)}
    if kind == "yarn":
        scaling = {
            "rope_type": "yarn",
            "factor": meta.need(f"{prefix}.factor", float),
            "original_max_position_embeddings": meta.need(f"{prefix}.original_context_length", int),
            "beta_fast": meta.get(f"{prefix}.yarn_beta_fast", float, None),
            "beta_slow": meta.get(f"{prefix}.yarn_beta_slow", float, None),
        }
        return {name: value for name, value in scaling.items() if value is not None}
    raise ConfigError(
        f"{meta.path}: the metadata {prefix}.type is {kind!r}; rotary scaling that can be read: none, linear, yarn, and Llama 3's"
    )


def _llama3_scaling(meta: Metadata, factors: "np.ndarray", config: dict[str, Any], other: dict[str, Any] | None) -> dict[str, Any] | None:
    """The scaling whose divisors the file holds. It has only these, so those of every Llama 3 are computed again and must be equal.

    All Llamas that scale so have low and high factor 1 and 4 and 8,192 original positions. They differ in the factor (8 in 3.1 and 3.3, 32 in
    3.2), which is the divisor of the slowest frequency.
    """
    import numpy as np

    scaling = {
        "rope_type": "llama3",
        "factor": float(factors[-1]),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = _llama3_divisors(config["rope_theta"], config["head_dim"], scaling)
    if other is not None or factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4, atol=0):
        raise ConfigError(
            f"{meta.path}: the tensor {ROPE_FACTORS} holds other divisors of the rotary frequencies than Llama 3's scaling with low and high "
            f"factor 1 and 4 and 8192 original positions (factor {factors[-1]:g}, theta {config['rope_theta']:g}, head_dim "
            f"{config['head_dim']}{', beside ' + str(other) if other else ''}); import the model's original Hugging Face folder instead"
        )
    return scaling if scaling["factor"] != 1.0 else None


def _llama3_divisors(theta: float, head_dim: int, scaling: dict[str, Any]) -> "np.ndarray":
    """f64[H/2]: what Llama 3.1 divides each rotary frequency by (Llama 3.1's release, `models/llama3/reference_impl/model.py`)."""
    import numpy as np

    turns = scaling["original_max_position_embeddings"] * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - kept) / scaling["factor"] + kept)
