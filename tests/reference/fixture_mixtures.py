"""The fixtures of mixtures of experts, by the same rules as `fixture_variants.py`: counts, widths and constants that nobody could guess."""

from fixture_variants import DENSE, LLAMA3, PLAIN_EPS, YARN, Options, Variant, rope
from older_configs import older, older_deepseek, older_gpt_oss

MIXTRAL_SIZES: Options = {
    **DENSE,
    **rope(3e5),
    "intermediate_size": 12,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
MIXTRAL = [
    Variant(
        "mixtral",
        "two of six experts, weights of the chosen made to sum to one, tensors apart for each expert",
        "MixtralConfig",
        MIXTRAL_SIZES,
        (PLAIN_EPS, rope(1e4), {"num_experts_per_tok": 3}),
    ),
    Variant(
        "mixtral-window",
        "window of 4 on all layers",
        "MixtralConfig",
        {**MIXTRAL_SIZES, "sliding_window": 4},
        ({"sliding_window": None}, {"sliding_window": 5}),
    ),
    Variant(
        "mixtral-older",
        "older spelling, no head_dim",
        "MixtralConfig",
        {},
        weights_of="mixtral",
        spelling=older(omit=("head_dim", "tie_word_embeddings")),
    ),
]

QWEN3_MOE_SIZES: Options = {
    **DENSE,
    **rope(2e6),
    "head_dim": 16,
    "num_key_value_heads": 1,
    "moe_intermediate_size": 12,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
QWEN3_MOE = [
    Variant(
        "qwen3-moe",
        "two of six experts, norms on queries and keys, weights of the chosen made to sum to one",
        "Qwen3MoeConfig",
        QWEN3_MOE_SIZES,
        (PLAIN_EPS, rope(1e4), {"norm_topk_prob": False}, {"num_experts_per_tok": 3}),
    ),
    Variant(
        "qwen3-moe-no-renorm",
        "weights of the chosen as the softmax over all experts has them",
        "Qwen3MoeConfig",
        {**QWEN3_MOE_SIZES, "norm_topk_prob": False},
        ({"norm_topk_prob": True},),
    ),
    Variant(
        "qwen3-moe-mlp-only",
        "the second of three layers is dense because it is listed",
        "Qwen3MoeConfig",
        {**QWEN3_MOE_SIZES, "head_dim": 8, "num_hidden_layers": 3, "mlp_only_layers": [1]},
    ),
    Variant(
        "qwen3-moe-step",
        "experts on every second of four layers",
        "Qwen3MoeConfig",
        {**QWEN3_MOE_SIZES, "head_dim": 8, "num_hidden_layers": 4, "decoder_sparse_step": 2},
    ),
    Variant("qwen3-moe-older", "older spelling", "Qwen3MoeConfig", {}, weights_of="qwen3-moe", spelling=older()),
]


def gpt_oss_rope(**changes: object) -> Options:
    return rope(1.4e5, **{**YARN, "beta_fast": 24.0, "beta_slow": 2.0, "truncate": False, **changes})


GPT_OSS_SIZES: Options = {
    **DENSE,
    **gpt_oss_rope(),
    "head_dim": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 10,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": 4,
    "swiglu_limit": 7.0,
}
GPT_OSS = [
    Variant(
        "gpt-oss",
        "sinks, windows on even layers, YaRN whose ramp is not rounded, biases everywhere, a clamp that is reached",
        "GptOssConfig",
        {**GPT_OSS_SIZES, "num_hidden_layers": 3},
        (
            PLAIN_EPS,
            rope(1.4e5),
            gpt_oss_rope(truncate=True),
            gpt_oss_rope(attention_factor=1.0),
            gpt_oss_rope(beta_fast=32.0, beta_slow=1.0),
            {"sliding_window": 5},
            {"sliding_window": 64},
            {"swiglu_limit": 1e9},
            {"num_experts_per_tok": 2},
        ),
        expert_gain=5.0,
    ),
    Variant(
        "gpt-oss-layer-types",
        "windows on odd layers",
        "GptOssConfig",
        {**GPT_OSS_SIZES, "layer_types": ["full_attention", "sliding_attention"]},
        ({"layer_types": ["sliding_attention", "full_attention"]},),
        expert_gain=5.0,
    ),
    Variant(
        "gpt-oss-older", "older spelling, as the Hub's files have it", "GptOssConfig", {}, weights_of="gpt-oss", spelling=older_gpt_oss
    ),
]

DEEPSEEK_YARN: Options = {**YARN, "beta_fast": 24.0, "beta_slow": 1.0}
DEEPSEEK_SIZES: Options = {
    **DENSE,
    "num_key_value_heads": 4,
    "intermediate_size": 28,
    "kv_lora_rank": 14,
    "q_lora_rank": 18,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
    "moe_intermediate_size": 9,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def v2_rope(**changes: object) -> Options:
    """Without `mscale_all_dim`, which transformers 5.12.1 leaves out of V2's softmax."""
    return rope(2e4, **{**DEEPSEEK_YARN, "mscale": 0.707, **changes})


V2_SIZES: Options = {**DEEPSEEK_SIZES, **v2_rope(), "routed_scaling_factor": 1.7, "norm_topk_prob": False, "topk_method": "greedy"}
V2_WITHOUT = (
    PLAIN_EPS,
    rope(2e4),
    v2_rope(attention_factor=1.0),
    {"routed_scaling_factor": 1.0},
    {"num_experts_per_tok": 3},
)
DEEPSEEK_V2 = [
    Variant(
        "deepseek-v2-lite",
        "latent keys and values, queries direct, YaRN, softmax of which two of six are taken as they are, two shared experts, one dense layer",
        "DeepseekV2Config",
        {**V2_SIZES, "q_lora_rank": None},
        V2_WITHOUT,
    ),
    Variant("deepseek-v2", "latent queries too", "DeepseekV2Config", V2_SIZES, V2_WITHOUT),
    Variant(
        "deepseek-v2-older",
        "older spelling, as the Hub's files have it",
        "DeepseekV2Config",
        {},
        weights_of="deepseek-v2",
        spelling=older_deepseek(scoring_func="softmax", topk_method="greedy", n_group=1, topk_group=1),
    ),
]


def v3_rope(theta: float = 2e4, **changes: object) -> Options:
    return rope(theta, **{**DEEPSEEK_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, **changes})


V3_SIZES: Options = {
    **DEEPSEEK_SIZES,
    **v3_rope(),
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.3,
    "norm_topk_prob": True,
}
V3_WITHOUT = (
    PLAIN_EPS,
    rope(2e4),
    v3_rope(mscale_all_dim=0.5),
    {"routed_scaling_factor": 1.0},
    {"norm_topk_prob": False},
    {"topk_group": 3},
    {"n_group": 2, "topk_group": 1},
    {"num_experts_per_tok": 2},
)
KIMI_SIZES: Options = {
    **V3_SIZES,
    **v3_rope(5e4, beta_fast=1.0, beta_slow=1.0),
    "n_routed_experts": 10,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
}
DEEPSEEK_V3 = [
    Variant(
        "deepseek-v3",
        "sigmoid scores with a selection bias, two of four groups, the chosen made to sum to one and scaled, YaRN in the softmax's scale",
        "DeepseekV3Config",
        V3_SIZES,
        V3_WITHOUT,
    ),
    Variant(
        "deepseek-v3-lite-q",
        "queries direct, nothing scaled",
        "DeepseekV3Config",
        {**V3_SIZES, **rope(2e4), "q_lora_rank": None},
        (rope(1e4),),
    ),
    Variant(
        "deepseek-v3-mscale",
        "mscale and mscale_all_dim that differ: a factor on cos and sin, another in the softmax's scale",
        "DeepseekV3Config",
        {**V3_SIZES, **v3_rope(mscale=0.7, mscale_all_dim=1.2), "num_hidden_layers": 2},
        (v3_rope(), v3_rope(mscale=1.2, mscale_all_dim=1.2), v3_rope(mscale=0.7, mscale_all_dim=0.7)),
    ),
    Variant(
        "deepseek-v3-biases",
        "biases on the latent projections and the output, rotary pairs by halves, the chosen not made to sum to one",
        "DeepseekV3Config",
        {**V3_SIZES, "num_hidden_layers": 2, "attention_bias": True, "rope_interleave": False, "norm_topk_prob": False},
        ({"rope_interleave": True}, {"norm_topk_prob": True}),
    ),
    Variant(
        "deepseek-v3-mtp",
        "a layer for multi-token prediction in the file",
        "DeepseekV3Config",
        {**V3_SIZES, "num_hidden_layers": 2, "num_nextn_predict_layers": 1},
        mtp=True,
    ),
    Variant(
        "deepseek-v3-older",
        "older spelling, as the Hub's files have it",
        "DeepseekV3Config",
        {},
        weights_of="deepseek-v3",
        spelling=older_deepseek(scoring_func="sigmoid", topk_method="noaux_tc"),
    ),
    Variant(
        "kimi-k2",
        "three of ten experts in one group, both betas of YaRN 1",
        "DeepseekV3Config",
        KIMI_SIZES,
        (
            v3_rope(5e4, beta_fast=32.0, beta_slow=1.0),
            {"n_group": 2},
            {"routed_scaling_factor": 2.5},
        ),
        model_type="kimi_k2",
    ),
    Variant(
        "kimi-k2-older",
        "older spelling, as the Hub's files have it",
        "DeepseekV3Config",
        {},
        weights_of="kimi-k2",
        spelling=older_deepseek(scoring_func="sigmoid", topk_method="noaux_tc", num_nextn_predict_layers=0),
        model_type="kimi_k2",
    ),
    Variant(
        "kimi-k25",
        "Kimi K2's text model inside one with vision, which transformers does not have",
        "DeepseekV3Config",
        {
            "architectures": ["KimiK25ForConditionalGeneration"],
            "model_type": "kimi_k25",
            "tie_word_embeddings": False,
            "dtype": "float32",
            "media_placeholder_token_id": 95,
            "pad_token_id": 94,
            "vision_config": {"vt_hidden_size": 8, "vt_num_hidden_layers": 1},
        },
        weights_of="kimi-k2",
        spelling=older_deepseek(scoring_func="sigmoid", topk_method="noaux_tc"),
        model_type="kimi_k2",
        file_prefix="language_model.",
    ),
]

# With 12 features the wavelengths are 6, 56, 499, ...: with low = high no frequency lies between kept and scaled.
LLAMA4_SIZES: Options = {
    **DENSE,
    **rope(3e5, **{**LLAMA3, "high_freq_factor": 1.0, "factor": 16.0}),
    "head_dim": 12,
    "num_key_value_heads": 1,
    "num_attention_heads": 3,
    "hidden_size": 32,
    "intermediate_size": 10,
    "intermediate_size_mlp": 20,
    "num_hidden_layers": 3,
    "num_local_experts": 5,
    "num_experts_per_tok": 1,
    "no_rope_layers": [1, 0, 1],
    "attention_chunk_size": 7,
    "use_qk_norm": True,
    "attn_temperature_tuning": True,
    "floor_scale": 5,
    "attn_scale": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SCOUT_WITHOUT = (
    PLAIN_EPS,
    rope(3e5),
    {"attention_chunk_size": 8},
    {"attention_chunk_size": 64},
    {"use_qk_norm": False},
    {"attn_temperature_tuning": False},
    {"floor_scale": 4},
    {"attn_scale": 0.1},
    {"no_rope_layers": [1, 1, 0]},
)
MAVERICK: Options = {
    **LLAMA4_SIZES,
    **rope(3e5),
    "num_hidden_layers": 4,
    "no_rope_layers": [],
    "use_qk_norm": False,
    "interleave_moe_layer_step": 2,
}
LLAMA4_CONDITIONAL: Options = {
    "text_config": {**LLAMA4_SIZES, "model_type": "llama4_text"},
    "vision_config": {
        "hidden_size": 8,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 28,
        "patch_size": 14,
        "vision_output_dim": 8,
        "projector_input_dim": 8,
        "projector_output_dim": 8,
        "model_type": "llama4_vision_model",
    },
    "image_token_index": 95,
    "boi_token_index": 94,
    "eoi_token_index": 93,
}
LLAMA4 = [
    Variant(
        "llama4-scout",
        "one of five experts by its input, a shared one, chunks, a layer without rope whose queries warm up, norms behind rope, pairs that alternate",
        "Llama4TextConfig",
        LLAMA4_SIZES,
        SCOUT_WITHOUT,
    ),
    Variant(
        "llama4-maverick",
        "experts on every second layer, no norms on queries and keys, the default layers without rope",
        "Llama4TextConfig",
        MAVERICK,
        (rope(1e4), {"attn_temperature_tuning": False}, {"no_rope_layers": [1, 1, 1, 1]}),
    ),
    Variant(
        "llama4-maverick-older",
        "older spelling, layers without rope and with experts by default",
        "Llama4TextConfig",
        {},
        weights_of="llama4-maverick",
        spelling=older(omit=("moe_layers", "tie_word_embeddings"), no_rope_layers=[], for_llm_compressor=False),
    ),
    Variant(
        "llama4-no-temperature",
        "queries of layers without rope that keep their temperature",
        "Llama4TextConfig",
        {**LLAMA4_SIZES, "num_hidden_layers": 2, "no_rope_layers": [1, 0], "attn_temperature_tuning": False},
        ({"attn_temperature_tuning": True},),
    ),
    Variant(
        "llama4-conditional",
        "the text model inside one with vision, under the names that files have",
        "Llama4Config",
        {**LLAMA4_CONDITIONAL, "text_config": {**LLAMA4_CONDITIONAL["text_config"], "num_hidden_layers": 2, "no_rope_layers": [1, 0]}},
        model="Llama4ForConditionalGeneration",
        text_prefix="language_model.",
        file_prefix="language_model.",
    ),
]

MIXTURES = {variant.name: variant for variant in MIXTRAL + QWEN3_MOE + GPT_OSS + DEEPSEEK_V2 + DEEPSEEK_V3 + LLAMA4}
