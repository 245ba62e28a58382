"""The table of fixtures: one tiny model per family, and beside it one more for each option, switched on alone.

Sizes are chosen so that no two dimensions that could be confused are equal, and constants (theta, epsilon, scales) so that
none is a default that an importer could guess. `without` lists settings that must be seen in the logits: making the model
again with one of them undone has to move some logit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from older_configs import older, older_gemma3

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
    branch_gain: float = 1.0
    """Of what blocks add to the stream. Where large embeddings would drown it, a greedy decode would repeat one token."""
    text_prefix: str = ""
    """Of the names in memory of what takes part in text."""
    file_prefix: str = ""
    """What the file has instead."""
    model: str = "AutoModelForCausalLM"
    """Class of the model in transformers."""
    model_type: str | None = None
    """What config.json says, where transformers does not know it by that name."""
    expert_gain: float = 1.0
    """Of gate and up of experts, where a clamp has to be reached."""
    mtp: bool = False
    """With a multi-token prediction layer in the file, which transformers drops."""


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

MISTRAL = [
    Variant(
        "mistral", "no window, said with null", "MistralConfig", {**DENSE, **rope(1e6), "sliding_window": None}, (PLAIN_EPS, rope(1e4))
    ),
    Variant(
        "mistral-window",
        "window of 4 on all layers",
        "MistralConfig",
        {**DENSE, **rope(1e4), "sliding_window": 4},
        ({"sliding_window": None}, {"sliding_window": 5}),
    ),
    Variant("mistral-head-dim", "heads wider than D/N", "MistralConfig", {**DENSE, **rope(1e6), "sliding_window": None, "head_dim": 16}),
    Variant("mistral-older", "older spelling, no head_dim", "MistralConfig", {}, weights_of="mistral", spelling=older(omit=("head_dim",))),
]

QWEN2_WINDOW: Options = {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
QWEN2 = [
    Variant("qwen2", "biases on queries, keys, values; untied", "Qwen2Config", {**DENSE, **rope(1e6)}, (PLAIN_EPS, rope(1e4))),
    Variant("qwen2-tied", "tied head", "Qwen2Config", {**DENSE, **rope(1e6), "tie_word_embeddings": True}),
    Variant(
        "qwen2-window",
        "window of 4 on the last two of three layers",
        "Qwen2Config",
        {**DENSE, **rope(1e6), **QWEN2_WINDOW},
        ({"use_sliding_window": False}, {"max_window_layers": 0}, {"max_window_layers": 2}, {"sliding_window": 5}),
    ),
    Variant(
        "qwen2-older",
        "older spelling, with a window that is switched off",
        "Qwen2Config",
        {},
        weights_of="qwen2",
        spelling=older(use_sliding_window=False, sliding_window=4, max_window_layers=1),
    ),
]

QWEN3_DENSE: Options = {**DENSE, "head_dim": 16}
QWEN3 = [
    Variant(
        "qwen3", "norms on queries and keys, N H is not D, untied", "Qwen3Config", {**QWEN3_DENSE, **rope(1e6)}, (PLAIN_EPS, rope(1e4))
    ),
    Variant("qwen3-tied", "tied head", "Qwen3Config", {**QWEN3_DENSE, **rope(1e6), "tie_word_embeddings": True}),
    Variant("qwen3-theta", "theta of the 2507 models", "Qwen3Config", {**QWEN3_DENSE, **rope(5e6)}, (rope(1e6),)),
    Variant("qwen3-biases", "biases on all linears of attention", "Qwen3Config", {**QWEN3_DENSE, **rope(1e6), "attention_bias": True}),
    Variant(
        "qwen3-window",
        "window of 4 on the last two of three layers",
        "Qwen3Config",
        {**QWEN3_DENSE, **rope(1e6), **QWEN2_WINDOW, "head_dim": 8},
        ({"use_sliding_window": False}, {"max_window_layers": 0}, {"max_window_layers": 2}, {"sliding_window": 5}),
    ),
]

GEMMA_DENSE: Options = {**DENSE, "head_dim": 16, "num_key_value_heads": 1}
GEMMA2_DENSE: Options = {
    **DENSE,
    **rope(3e4),
    "num_hidden_layers": 3,
    "head_dim": 8,
    "query_pre_attn_scalar": 3,
    "sliding_window": 4,
    "attn_logit_softcapping": 0.5,
    "final_logit_softcapping": 3.0,
}
GEMMA = [
    Variant(
        "gemma",
        "one kv head, tanh-GELU",
        "GemmaConfig",
        {**GEMMA_DENSE, **rope(3e4)},
        (PLAIN_EPS, rope(1e4), {"hidden_act": "silu"}),
        branch_gain=5.0,
    ),
    Variant(
        "gemma-older",
        "older spelling, the tied head left to the family's default",
        "GemmaConfig",
        {},
        weights_of="gemma",
        spelling=older(omit=("tie_word_embeddings",), hidden_activation="gelu_pytorch_tanh"),
    ),
    Variant(
        "gemma2",
        "caps on scores and logits, scale from the config, windows on layers 0 and 2, four norms a layer",
        "Gemma2Config",
        GEMMA2_DENSE,
        (
            PLAIN_EPS,
            rope(1e4),
            {"attn_logit_softcapping": None},
            {"final_logit_softcapping": None},
            {"query_pre_attn_scalar": 8},
            {"sliding_window": 5},
            {"sliding_window": 64},
        ),
    ),
    Variant(
        "gemma2-older",
        "older spelling, without layer types",
        "Gemma2Config",
        {},
        weights_of="gemma2",
        spelling=older(omit=("tie_word_embeddings",), cache_implementation="hybrid"),
    ),
    Variant(
        "gemma2-mha",
        "without caps, as many kv heads as query heads",
        "Gemma2Config",
        {**GEMMA2_DENSE, "num_key_value_heads": 4, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
]


def gemma3_rope(local: float = 1e4, **scaling: Any) -> Options:
    return {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6, **scaling},
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }
    }


GEMMA3_DENSE: Options = {
    **DENSE,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 40,
    "num_hidden_layers": 7,
    "query_pre_attn_scalar": 40,
    "sliding_window": 4,
    **gemma3_rope(rope_type="linear", factor=8.0),
}
GEMMA3_VISION: Options = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 28,
    "patch_size": 14,
    "vision_use_head": False,
}
GEMMA3_CONDITIONAL: Options = {
    "text_config": {**GEMMA3_DENSE, "num_hidden_layers": 6, "model_type": "gemma3_text"},
    "vision_config": {**GEMMA3_VISION, "model_type": "siglip_vision_model"},
    "mm_tokens_per_image": 4,
}
GEMMA3 = [
    Variant(
        "gemma3",
        "one whole pattern S S S S S G and a remainder, norms on queries and keys, two thetas, linear scaling on the global layer",
        "Gemma3TextConfig",
        GEMMA3_DENSE,
        (
            PLAIN_EPS,
            gemma3_rope(),
            gemma3_rope(local=1e6, rope_type="linear", factor=8.0),
            {"query_pre_attn_scalar": 16},
            {"sliding_window": 5},
            {"sliding_window": 64},
        ),
    ),
    Variant(
        "gemma3-short",
        "five layers S S G S S, no scaling",
        "Gemma3TextConfig",
        {**GEMMA3_DENSE, **gemma3_rope(), "num_hidden_layers": 5, "sliding_window_pattern": 3},
        ({"sliding_window_pattern": 2},),
    ),
    Variant(
        "gemma3-older", "older spelling: flat rope, pattern as a number", "Gemma3TextConfig", {}, weights_of="gemma3", spelling=older_gemma3
    ),
    Variant(
        "gemma3-conditional",
        "the text tower inside a model with vision, names as most files have them",
        "Gemma3Config",
        GEMMA3_CONDITIONAL,
        text_prefix="model.language_model.",
        file_prefix="language_model.model.",
    ),
    Variant(
        "gemma3-conditional-renamed",
        "the same weights under the names that transformers has in memory",
        "Gemma3Config",
        GEMMA3_CONDITIONAL,
        weights_of="gemma3-conditional",
        text_prefix="model.language_model.",
        file_prefix="model.language_model.",
    ),
]

OLMO3_DENSE: Options = {**DENSE, "num_hidden_layers": 5, "intermediate_size": 40, "sliding_window": 4}
OLMO3_YARN: Options = {
    **OLMO3_DENSE,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    **_scaled(YARN, attention_factor=1.2079441541679836, beta_fast=32.0, beta_slow=1.0),
}
OLMO = [
    Variant(
        "olmo2",
        "norms behind the sublayers and over all heads",
        "Olmo2Config",
        {**DENSE, **rope(5e5), "num_key_value_heads": 4},
        (PLAIN_EPS, rope(1e4)),
    ),
    Variant("olmo2-gqa", "grouped queries, an odd number of layers", "Olmo2Config", {**DENSE, **rope(5e5), "num_hidden_layers": 3}),
    Variant(
        "olmo3",
        "layers S S S G S, nothing scaled",
        "Olmo3Config",
        {**OLMO3_DENSE, **rope(5e5)},
        (rope(1e4), {"sliding_window": 5}, {"sliding_window": 64}),
    ),
    Variant(
        "olmo3-yarn",
        "YaRN on every layer, as transformers 5.12.1 has it",
        "Olmo3Config",
        OLMO3_YARN,
        (rope(5e5), _scaled(YARN, attention_factor=1.0)),
    ),
    Variant("olmo3-yarn-older", "older spelling, without layer types", "Olmo3Config", {}, weights_of="olmo3-yarn", spelling=older()),
    Variant(
        "olmo3-yarn-trained",
        "YaRN on full-attention layers only, as the model was trained",
        "Olmo3Config",
        OLMO3_YARN,
        (rope(5e5), _scaled(YARN, attention_factor=1.0)),
        weights_of="olmo3-yarn",
        plain_rope_on_sliding_layers=True,
    ),
]

GPT2 = [
    Variant(
        "gpt2",
        "learned positions, LayerNorm, biases, fused queries, keys and values, ungated MLP: the nearest to GPT-3's block that has a class",
        "GPT2Config",
        {
            "vocab_size": 96,
            "n_positions": 128,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_inner": 48,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-2,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        ({"layer_norm_epsilon": 1e-6}, {"activation_function": "silu"}),
        branch_gain=2.0,
        offsets=(0, 7, 100, 119),
        jumps=(0, 1, 7, 20, 21, 60, 100, 127),
    ),
]

VARIANTS = {variant.name: variant for variant in LLAMA + MISTRAL + QWEN2 + QWEN3 + GEMMA + GEMMA3 + OLMO + GPT2}
