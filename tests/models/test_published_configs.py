"""The config.json files of published checkpoints, as their publishers wrote them: all are read, and give the presets' sizes."""

from typing import Any

import pytest

from telamon.config.load import load_run, plain
from telamon.config.schema import ModelConfig
from telamon.models.hf import config_from_hf
from telamon.models.weights import Model

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
}
LLAMA_3 = LLAMA | {"bos_token_id": 128000, "eos_token_id": 128001, "num_key_value_heads": 8, "rope_theta": 500000.0, "vocab_size": 128256}
LLAMA_3_ROPE = {"high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}
SMOLLM2 = LLAMA | {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "pad_token_id": 2,
    "rope_interleaved": False,
    "tie_word_embeddings": True,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "vocab_size": 49152,
}
MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
MIXTRAL = {name: value for name, value in MISTRAL.items() if name != "rope_theta"} | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "transformers_version": "4.36.0.dev0",
    "vocab_size": 32000,
}
QWEN: dict[str, Any] = {
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-06,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
}
QWEN2 = QWEN | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rope_theta": 1000000.0, "use_mrope": False}
QWEN3 = QWEN | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "vocab_size": 151936,
}
QWEN3_MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "output_router_logits": False,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
}
GEMMA: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "initializer_range": 0.02,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 256000,
}
GEMMA_2 = GEMMA | {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "hidden_act": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
GEMMA_3 = GEMMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "max_position_embeddings": 32768,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "vocab_size": 262144,
}


def _multimodal(**text: Any) -> dict[str, Any]:
    """Gemma 3 with its eyes: the text part says only what differs from what transformers takes."""
    scaled = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024, "model_type": "gemma3_text"}
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": scaled | text,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0",
        "vision_config": {"hidden_size": 1152, "image_size": 896, "model_type": "siglip_vision_model", "vision_use_head": False},
    }


OLMO: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "pad_token_id": 100277,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "use_cache": True,
}
OLMO_2 = OLMO | {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "max_position_embeddings": 4096, "vocab_size": 100352}
OLMO_3 = OLMO | {
    "architectures": ["Olmo3ForCausalLM"],
    "model_type": "olmo3",
    "dtype": "bfloat16",
    "max_position_embeddings": 65536,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    "sliding_window": 4096,
    "vocab_size": 100278,
}
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_experts_per_tok": 4,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}


def _llama_4(**text: Any) -> dict[str, Any]:
    """The text model within one with eyes; layers without rotation, and those with experts, are where the defaults have them."""
    said = {
        "_attn_implementation_autoset": True,
        "attention_bias": False,
        "attention_chunk_size": 8192,
        "attention_dropout": 0.0,
        "bos_token_id": 200000,
        "eos_token_id": 200001,
        "for_llm_compressor": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "intermediate_size_mlp": 16384,
        "max_position_embeddings": 262144,
        "model_type": "llama4_text",
        "no_rope_layers": [],
        "num_experts_per_tok": 1,
        "output_router_logits": False,
        "pad_token_id": 200018,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 500000.0,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 202048,
    }
    return {
        "architectures": ["Llama4ForConditionalGeneration"],
        "boi_token_index": 200080,
        "eoi_token_index": 200081,
        "image_token_index": 200092,
        "model_type": "llama4",
        "text_config": said | _sizes(48, 5120, 40, 8, 8192) | text,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0.dev0",
        "vision_config": {"hidden_size": 1408, "image_size": 336, "model_type": "llama4_vision_model", "pixel_shuffle_ratio": 0.5},
    }


def _sizes(layers: int, width: int, heads: int, kv_heads: int, ffn: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
    }


def _llama_3(
    factor: float | None, layers: int, width: int, heads: int, ffn: int, *, positions: int = 131072, **others: Any
) -> dict[str, Any]:
    scaling = None if factor is None else LLAMA_3_ROPE | {"factor": factor}
    return LLAMA_3 | _sizes(layers, width, heads, 8, ffn) | {"max_position_embeddings": positions, "rope_scaling": scaling} | others


def _qwen2(*sizes: int, positions: int, vocab: int, tied: bool, **others: Any) -> dict[str, Any]:
    """A window that is not used stands in every file."""
    said = {"max_position_embeddings": positions, "sliding_window": positions, "tie_word_embeddings": tied, "vocab_size": vocab}
    return QWEN2 | _sizes(*sizes) | said | {"max_window_layers": sizes[0]} | others


def _qwen3_moe(*sizes: int, expert: int, **others: Any) -> dict[str, Any]:
    """A dense width, which no layer has, and a window, which no layer uses, stand in every file."""
    return QWEN3_MOE | _sizes(*sizes) | {"max_window_layers": sizes[0], "moe_intermediate_size": expert} | others


def _pattern(layers: int, period: int) -> list[str]:
    return ["full_attention" if (layer + 1) % period == 0 else "sliding_attention" for layer in range(layers)]


PUBLISHED: dict[str, dict[str, Any]] = {
    "llama2-7b": {name: value for name, value in LLAMA.items() if name not in ("attention_bias", "attention_dropout", "mlp_bias")}
    | _sizes(32, 4096, 32, 32, 11008)
    | {"max_position_embeddings": 4096, "vocab_size": 32000, "torch_dtype": "float16", "bos_token_id": 1, "eos_token_id": 2},
    "llama3-8b": _llama_3(None, 32, 4096, 32, 14336, positions=8192),
    "llama3.1-8b": _llama_3(8.0, 32, 4096, 32, 14336),
    "llama3.1-405b": _llama_3(8.0, 126, 16384, 128, 53248, head_dim=128),
    "llama3.2-1b": _llama_3(32.0, 16, 2048, 32, 8192, head_dim=64, tie_word_embeddings=True),
    "llama3.2-3b": _llama_3(32.0, 28, 3072, 24, 8192, head_dim=128, tie_word_embeddings=True),
    "llama3.3-70b": _llama_3(8.0, 80, 8192, 64, 28672, head_dim=128, eos_token_id=[128001, 128008, 128009]),
    "smollm2-135m": SMOLLM2 | _sizes(30, 576, 9, 3, 1536) | {"initializer_range": 0.041666666666666664, "rope_theta": 100000},
    "smollm2-360m": SMOLLM2 | _sizes(32, 960, 15, 5, 2560) | {"rope_theta": 100000},
    "smollm2-1.7b": SMOLLM2 | _sizes(24, 2048, 32, 32, 8192) | {"rope_theta": 130000},
    "mistral-7b-v0.1": MISTRAL | {"rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 32000},
    "mistral-7b-v0.2": MISTRAL | {"rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32000},
    "mistral-7b-v0.3": MISTRAL | {"rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32768},
    "qwen2.5-0.5b": _qwen2(24, 896, 14, 2, 4864, positions=32768, vocab=151936, tied=True),
    "qwen2.5-7b": _qwen2(28, 3584, 28, 4, 18944, positions=131072, vocab=152064, tied=False),
    "qwen2.5-14b": _qwen2(48, 5120, 40, 8, 13824, positions=131072, vocab=152064, tied=False, rms_norm_eps=1e-05),
    "qwen2.5-72b": _qwen2(80, 8192, 64, 8, 29568, positions=131072, vocab=152064, tied=False, rms_norm_eps=1e-05),
    "qwen3-0.6b": QWEN3 | _sizes(28, 1024, 16, 8, 3072) | {"max_window_layers": 28, "tie_word_embeddings": True},
    "qwen3-8b": QWEN3 | _sizes(36, 4096, 32, 8, 12288) | {"max_window_layers": 36, "tie_word_embeddings": False},
    "qwen3-32b": QWEN3 | _sizes(64, 5120, 64, 8, 25600) | {"max_window_layers": 64, "tie_word_embeddings": False},
    "mixtral-8x7b": MIXTRAL,
    "mixtral-8x22b": MIXTRAL
    | _sizes(56, 6144, 48, 8, 16384)
    | {"max_position_embeddings": 65536, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "vocab_size": 32768},
    "qwen3-30b-a3b": _qwen3_moe(48, 2048, 32, 4, 6144, expert=768),
    "qwen3-30b-a3b-2507": _qwen3_moe(48, 2048, 32, 4, 6144, expert=768, max_position_embeddings=262144, rope_theta=10000000),
    "qwen3-235b-a22b": _qwen3_moe(94, 4096, 64, 4, 12288, expert=1536),
    "qwen3-235b-a22b-2507": _qwen3_moe(94, 4096, 64, 4, 12288, expert=1536, max_position_embeddings=262144, rope_theta=5000000),
    "qwen3-coder-480b-a35b": {name: value for name, value in QWEN3_MOE.items() if name not in ("bos_token_id", "sliding_window")}
    | _sizes(62, 6144, 96, 8, 8192)
    | {
        "max_position_embeddings": 262144,
        "max_window_layers": 62,
        "moe_intermediate_size": 2560,
        "num_experts": 160,
        "qkv_bias": False,
        "rope_theta": 10000000,
        "router_aux_loss_coef": 0.0,
        "shared_expert_intermediate_size": 0,
        "use_qk_norm": True,
    },
    "gemma-2b": GEMMA
    | _sizes(18, 2048, 8, 1, 16384)
    | {"architectures": ["GemmaForCausalLM"], "model_type": "gemma", "hidden_act": "gelu", "hidden_activation": None, "rope_scaling": None},
    "gemma2-2b": GEMMA_2 | _sizes(26, 2304, 8, 4, 9216),
    "gemma2-9b": GEMMA_2 | _sizes(42, 3584, 16, 8, 14336) | {"sliding_window_size": 4096},
    "gemma2-27b": GEMMA_2 | _sizes(46, 4608, 32, 16, 36864) | {"head_dim": 128, "query_pre_attn_scalar": 144, "sliding_window_size": 4096},
    "gemma3-270m": GEMMA_3
    | _sizes(18, 640, 4, 1, 2048)
    | {"_sliding_window_pattern": 6, "layer_types": _pattern(18, 6), "use_bidirectional_attention": False},
    "gemma3-1b": GEMMA_3 | _sizes(26, 1152, 4, 1, 6912) | {"cache_implementation": "hybrid", "sliding_window_pattern": 6},
    "gemma3-4b": _multimodal(hidden_size=2560, intermediate_size=10240, num_hidden_layers=34),
    "gemma3-12b": _multimodal(
        hidden_size=3840, intermediate_size=15360, num_attention_heads=16, num_hidden_layers=48, num_key_value_heads=8
    ),
    "gemma3-27b": _multimodal(**_sizes(62, 5376, 32, 16, 21504), head_dim=128, query_pre_attn_scalar=168),
    "olmo2-7b": OLMO_2 | _sizes(32, 4096, 32, 32, 11008),
    "olmo2-13b": OLMO_2 | _sizes(40, 5120, 40, 40, 13824),
    "olmo3-7b": OLMO_3 | _sizes(32, 4096, 32, 32, 11008) | {"layer_types": _pattern(32, 4)},
    "olmo3-32b": OLMO_3 | _sizes(64, 5120, 40, 8, 27648) | {"layer_types": _pattern(64, 4)},
    "gpt-oss-20b": GPT_OSS | _sizes(24, 2880, 64, 8, 2880) | {"layer_types": _pattern(24, 2), "num_local_experts": 32},
    "gpt-oss-120b": GPT_OSS | _sizes(36, 2880, 64, 8, 2880) | {"layer_types": _pattern(36, 2), "num_local_experts": 128},
    # A whole number stands for a temperature that is on.
    "llama4-scout": _llama_4(
        attn_scale=0.1,
        attn_temperature_tuning=4,
        cache_implementation="hybrid",
        floor_scale=8192,
        interleave_moe_layer_step=1,
        num_local_experts=16,
        rope_scaling=LLAMA_3_ROPE | {"factor": 16.0, "high_freq_factor": 1.0},
        use_qk_norm=True,
    ),
    "llama4-maverick": _llama_4(interleave_moe_layer_step=2, num_local_experts=128, use_qk_norm=False),
}


def _deepseek(version: int, **sizes: Any) -> dict[str, Any]:
    """What the files of DeepSeek V2 and V3 and of Kimi K2 share, with marks of training and of their authors' own code."""
    return {
        "architectures": [f"DeepseekV{version}ForCausalLM"],
        "model_type": f"deepseek_v{version}",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {
            "AutoConfig": f"configuration_deepseek.DeepseekV{version}Config",
            "AutoModelForCausalLM": f"modeling_deepseek.DeepseekV{version}ForCausalLM",
        },
        "ep_size": 1,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "kv_lora_rank": 512,
        "moe_layer_freq": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "v_head_dim": 128,
        **sizes,
    }


def _yarn(factor: float, mscale: float, beta_fast: float = 32) -> dict[str, Any]:
    return {
        "rope_scaling": {
            "beta_fast": beta_fast,
            "beta_slow": 1,
            "factor": factor,
            "mscale": mscale,
            "mscale_all_dim": mscale,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        }
    }


DEEPSEEK_2 = _deepseek(
    2,
    aux_loss_alpha=0.001,
    bos_token_id=100000,
    eos_token_id=100001,
    first_k_dense_replace=1,
    max_position_embeddings=163840,
    n_shared_experts=2,
    norm_topk_prob=False,
    num_experts_per_tok=6,
    pretraining_tp=1,
    scoring_func="softmax",
    seq_aux=True,
    vocab_size=102400,
    **_yarn(40, 0.707),
)
DEEPSEEK_3 = _deepseek(
    3,
    moe_intermediate_size=2048,
    n_shared_experts=1,
    norm_topk_prob=True,
    num_experts_per_tok=8,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
)
KIMI: dict[str, Any] = (
    DEEPSEEK_3
    | _sizes(61, 7168, 64, 64, 18432)
    | {"model_type": "kimi_k2", "aux_loss_alpha": 0.001, "seq_aux": True, "pretraining_tp": 1, "num_nextn_predict_layers": 0}
    | {"bos_token_id": 163584, "eos_token_id": 163585, "vocab_size": 163840, "rope_theta": 50000.0, "first_k_dense_replace": 1}
    | {"n_routed_experts": 384, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827}
)
PUBLISHED |= {
    "deepseek-v2-lite-16b": DEEPSEEK_2
    | _sizes(27, 2048, 16, 16, 10944)
    | {"q_lora_rank": None, "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_group": 1, "topk_group": 1}
    | {"topk_method": "greedy", "routed_scaling_factor": 1.0},
    "deepseek-v2-236b": DEEPSEEK_2
    | _sizes(60, 5120, 128, 128, 12288)
    | {"moe_intermediate_size": 1536, "n_routed_experts": 160, "n_group": 8, "topk_group": 3}
    | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0},
    "deepseek-v3-671b": DEEPSEEK_3
    | _sizes(61, 7168, 128, 128, 18432)
    | {"bos_token_id": 0, "eos_token_id": 1, "first_k_dense_replace": 3, "max_position_embeddings": 163840, "vocab_size": 129280}
    | {"n_routed_experts": 256, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1}
    | _yarn(40, 1.0),
    "kimi-k2-1t": KIMI | {"max_position_embeddings": 131072} | _yarn(32.0, 1.0, 1.0),
    "kimi-k2-thinking": KIMI | {"max_position_embeddings": 262144, "rms_norm_eps": 1e-05} | _yarn(64.0, 1.0, 1.0),
    "kimi-k2-0905": KIMI | {"max_position_embeddings": 262144} | _yarn(64.0, 1.0, 1.0),
    "kimi-k2.5-text": {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
        "bos_token_id": 163584,
        "dtype": "bfloat16",
        "eos_token_id": 163585,
        "ignore_index": -100,
        "media_placeholder_token_id": 163605,
        "pad_token_id": 163839,
        "text_config": KIMI
        | {"max_position_embeddings": 262144, "rms_norm_eps": 1e-05, "add_cross_attention": False, "id2label": {"0": "LABEL_0"}}
        | {"is_decoder": False, "is_encoder_decoder": False, "pruned_heads": {}, "return_dict": True, "use_bfloat16": False}
        | _yarn(64.0, 1.0),
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "vision_config": {"mm_projector_type": "patchmerger", "model_type": "", "vt_hidden_size": 1152},
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_gives_the_sizes_of_its_preset(name: str):
    """Odd keys of real files among them: SmolLM2's marks, Gemma 2's second word for its window, Gemma 3's text within another model."""
    expected = load_run(overrides=[f"model.preset={name}"]).config.model
    assert _sized(config_from_hf(PUBLISHED[name])) == _sized(expected)


def _sized(model: ModelConfig) -> dict[str, Any]:
    """Without what a config.json has no place for, and without DeepSeek V3's layer that predicts a further token, which presets leave out."""
    aside = {"preset", "published_parameters", "published_active_parameters", "mtp_layers"}
    return {name: value for name, value in plain(model).items() if name not in aside}


def test_gpt_2_is_read():
    """124,439,808 parameters, with what its file says to other programs."""
    gpt2 = {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 50256,
        "embd_pdrop": 0.1,
        "eos_token_id": 50256,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "output_past": True,
        "resid_pdrop": 0.1,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
    }
    assert Model(config_from_hf(gpt2).spec()).parameter_count == 124_439_808
