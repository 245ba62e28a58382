import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_gguf as tiny

from telamon.errors import ConfigError
from telamon.hub.gguf_file import GgufFile


def config(path: Path, arch: str, metadata: dict[str, Any], tensors: dict[str, Any] | None = None) -> dict[str, Any]:
    with GgufFile(tiny.write(path / "a.gguf", arch, metadata, tensors)) as source:
        return source.config


def llama3_divisors(factor: float, *, theta: float, head_dim: int, low: float = 1.0, high: float = 4.0, original: int = 8192) -> np.ndarray:
    """What llama.cpp's converter writes for Llama 3: by wavelength, one frequency after the other."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


COMMON = {
    "vocab_size": tiny.V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": True,
    "rope_theta": 10_000.0,
    "rope_scaling": None,
}
GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
LAYERS_OF_GEMMA2 = ["sliding_attention", "full_attention"]
KNOWN = {
    "llama": ({}, {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "architectures": ["LlamaForCausalLM"]}),
    "qwen2": (
        {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 16},
        {
            "hidden_act": "silu",
            "use_sliding_window": False,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
            "architectures": ["Qwen2ForCausalLM"],
        },
    ),
    "qwen3": (
        {"attention__key_length": 16, "attention__value_length": 16},
        {
            "hidden_act": "silu",
            "use_sliding_window": False,
            "attention_bias": False,
            "head_dim": 16,
            "architectures": ["Qwen3ForCausalLM"],
        },
    ),
    "gemma": (
        {"rope__freq_base": None},
        {"hidden_act": "gelu_pytorch_tanh", "attention_bias": False, "architectures": ["GemmaForCausalLM"]},
    ),
    "gemma2": (
        {
            "rope__freq_base": None,
            "attention__key_length": 16,
            "attention__sliding_window": 12,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        GEMMA
        | {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 12,
            "layer_types": LAYERS_OF_GEMMA2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "architectures": ["Gemma2ForCausalLM"],
        },
    ),
    "gemma3": (
        {
            "block_count": 8,
            "rope__freq_base": 1_000_000.0,
            "rope__scaling__type": "linear",
            "rope__scaling__factor": 8.0,
            "attention__sliding_window": 12,
        },
        GEMMA
        | {
            "num_hidden_layers": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": 12,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 2,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "architectures": ["Gemma3ForCausalLM"],
        },
    ),
}


@pytest.mark.parametrize("arch", KNOWN)
def test_metadata_become_the_attributes_of_config_json(tmp_path: Path, arch: str):
    written, expected = KNOWN[arch]
    model_type = {"gemma3": "gemma3_text"}.get(arch, arch)
    assert config(tmp_path, arch, tiny.sizes(arch, **written)) == COMMON | {"model_type": model_type} | expected


def test_tensors_tell_of_biases_and_of_an_output_matrix(tmp_path: Path):
    shapes = {"blk.0.attn_q.bias": 32, "blk.0.ffn_up.bias": 48, "output.weight": (tiny.V, 32)}
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    found = config(tmp_path, "llama", tiny.sizes("llama"), tensors)
    assert (found["attention_bias"], found["mlp_bias"], found["tie_word_embeddings"]) == (True, True, False)


def test_a_window_makes_a_mistral(tmp_path: Path):
    found = config(tmp_path, "llama", tiny.sizes("llama", attention__sliding_window=32))
    assert (found["model_type"], found["sliding_window"]) == ("mistral", 32) and "attention_bias" not in found


@pytest.mark.parametrize(("arch", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_gemmas_27b_divides_queries_by_the_width_of_the_model_over_its_heads(tmp_path: Path, arch: str, layers: int):
    known = {"block_count": layers, "embedding_length": 40, "attention__key_length": 16, "attention__sliding_window": 12}
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0} if arch == "gemma2" else {}
    assert config(tmp_path, arch, tiny.sizes(arch, **known, **caps))["query_pre_attn_scalar"] == 40 // 4
    assert config(tmp_path, arch, tiny.sizes(arch, **(known | {"block_count": 26}), **caps))["query_pre_attn_scalar"] == 16


@pytest.mark.parametrize(
    ("pattern", "windowed"), [(3, [True, True, False, True]), ([True, False, False, True], [True, False, False, True])]
)
def test_a_file_may_say_which_layers_have_the_window(tmp_path: Path, pattern: Any, windowed: list[bool]):
    known = {"block_count": 4, "attention__sliding_window": 12, "attention__sliding_window_pattern": pattern, "rope__freq_base_swa": 500.0}
    found = config(tmp_path, "gemma3", tiny.sizes("gemma3", **known))
    assert [kind == "sliding_attention" for kind in found["layer_types"]] == windowed
    assert found["rope_local_base_freq"] == 500.0


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_divisors_of_llama_3_become_its_scaling(tmp_path: Path, factor: float):
    known = tiny.sizes("llama", attention__key_length=64, rope__dimension_count=64, rope__freq_base=500_000.0)
    divisors = llama3_divisors(factor, theta=500_000.0, head_dim=64)
    found = config(tmp_path, "llama", known, {"rope_freqs.weight": divisors})
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert found["rope_scaling"] == scaling
    assert len(set(divisors.tolist())) > 4  # kept, blended and divided ones


@pytest.mark.parametrize("other", [{"low": 2.0}, {"high": 3.0}, {"original": 4096}, {"theta": 400_000.0}, {"head_dim": 32}])
def test_other_divisors_are_refused(tmp_path: Path, other: dict[str, Any]):
    known = tiny.sizes("llama", attention__key_length=64, rope__freq_base=500_000.0)
    divisors = llama3_divisors(8.0, **({"theta": 500_000.0, "head_dim": 64} | other))
    with pytest.raises(ConfigError, match=r"rope_freqs.weight holds other divisors .* than Llama 3's .*factor 8, theta 500000"):
        config(tmp_path, "llama", known, {"rope_freqs.weight": divisors})


def test_divisors_beside_another_scaling_are_refused(tmp_path: Path):
    known = tiny.sizes("llama", attention__key_length=64, rope__freq_base=5e5, rope__scaling__type="linear", rope__scaling__factor=2.0)
    with pytest.raises(ConfigError, match=r"rope_freqs.weight .* beside .*linear"):
        config(tmp_path, "llama", known, {"rope_freqs.weight": llama3_divisors(8.0, theta=5e5, head_dim=64)})


def test_the_scaling_of_2023_is_read(tmp_path: Path):
    assert config(tmp_path, "llama", tiny.sizes("llama", rope__scale_linear=2.0))["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


NEEDED = [
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
]


@pytest.mark.parametrize(
    ("arch", "key"),
    [("llama", key) for key in NEEDED]
    + [("qwen2", "rope.freq_base"), ("qwen3", "rope.freq_base"), ("gemma3", "rope.freq_base"), ("gemma3", "attention.sliding_window")]
    + [("gemma2", key) for key in ("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping")],
)
def test_missing_metadata_are_refused_by_name(tmp_path: Path, arch: str, key: str):
    written = tiny.sizes(arch, **KNOWN[arch][0])
    del written[f"{arch}.{key}"]
    with pytest.raises(
        ConfigError, match=rf"a\.gguf: the metadata has no {arch}\.{key.replace('.', '[.]')}, .*convert the model to GGUF again"
    ):
        config(tmp_path, arch, written)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"logit_scale": 0.5, "attention__scale": 0.1},
            ["llama.logit_scale=0.5", "llama.attention.scale=", "original Hugging Face folder"],
        ),
        ({"expert_count": 8}, ["llama.expert_count is 8", "only 0", "mixtures of experts"]),
        ({"attention__causal": False}, ["llama.attention.causal is False", "later tokens"]),
        ({"rope__dimension_count": 4}, ["llama.rope.dimension_count is 4", "only 8"]),
        ({"attention__value_length": 4}, ["llama.attention.value_length is 4", "only 8"]),
        ({"rope__scaling__type": "longrope"}, ["llama.rope.scaling.type is 'longrope'", "none, linear, yarn"]),
        ({"rope__scaling__factor": 4.0}, ["llama.rope.scaling.factor is 4.0", "no llama.rope.scaling.type"]),
        ({"rope__scaling__type": "linear"}, ["has no llama.rope.scaling.factor"]),
        ({"attention__head_count_kv": [2, 1]}, ["llama.attention.head_count_kv is [2, 1], not a whole number"]),
        ({"block_count": "two"}, ["llama.block_count is 'two', not a whole number"]),
        ({"block_count": True}, ["llama.block_count is True, not a whole number"]),
        ({"attention__head_count": 5}, ["has no llama.attention.key_length"]),
    ],
)
def test_metadata_that_would_change_numbers_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], words: list[str]):
    with pytest.raises(ConfigError) as caught:
        config(tmp_path, "llama", tiny.sizes("llama", **changes))
    assert all(word in str(caught.value) for word in ("a.gguf", *words)), caught.value


@pytest.mark.parametrize("pattern", [0, [True], "all"])
def test_a_pattern_of_windows_that_does_not_fit_is_refused(tmp_path: Path, pattern: Any):
    known = tiny.sizes("gemma3", attention__sliding_window=12, attention__sliding_window_pattern=pattern)
    with pytest.raises(
        ConfigError, match=r"gemma3.attention.sliding_window_pattern is .*, neither a period nor a list for each of the 2 layers"
    ):
        config(tmp_path, "gemma3", known)
