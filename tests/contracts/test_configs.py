"""config.json of every family: both spellings, the way back, and refusals by name."""

from collections.abc import Iterator, Set
from typing import Any

import checkpoints
import pytest
from reference import fixtures

from telamon.errors import ConfigError
from telamon.models.hf import config_from_hf, hf_families

OLDER = checkpoints.names()
RESPELT = {
    name: fixtures.load(name).meta["same_as"]["expected.npz"] for name in OLDER if "expected.npz" in fixtures.load(name).meta["same_as"]
}
ONE_EACH = {fixtures.load(name).config["model_type"]: name for name in reversed(checkpoints.names())}


def test_every_family_has_fixtures():
    assert set(ONE_EACH) == set(hf_families())


@pytest.mark.parametrize("name", [name for name in RESPELT if name != "olmo3-yarn-trained"])
def test_the_older_spelling_means_the_same(name: str):
    """`torch_dtype`, `rope_theta` beside `rope_scaling` with `type`, and attributes left out."""
    assert fixtures.load(name).config != fixtures.load(RESPELT[name]).config
    assert checkpoints.config(fixtures.load(name)) == checkpoints.config(fixtures.load(RESPELT[name]))


@pytest.mark.parametrize("name", checkpoints.names())
def test_what_is_written_is_read_back_as_the_same(name: str):
    config = config_from_hf(fixtures.load(name).config)
    assert config_from_hf(config.to_hf()) == config


@pytest.mark.parametrize("model_type", ONE_EACH)
def test_an_unknown_attribute_is_refused_by_name(model_type: str):
    raw = fixtures.load(ONE_EACH[model_type]).config
    text = {"text_config": raw["text_config"] | {"residual_multiplier": 0.22}} if "text_config" in raw else {"residual_multiplier": 0.22}
    with pytest.raises(ConfigError, match=r"somewhere/config.json: not known here: residual_multiplier=0.22; it may change"):
        config_from_hf(raw | text, source="somewhere/config.json")


LLAMA = fixtures.load("llama-llama3").config
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "lama"}, "model_type='lama' belongs to no family here; those that can be read: .*llama"),
        ({"model_type": "mamba"}, "model_type='mamba' belongs to no family here; those that can be read: deepseek_v2, deepseek_v3, gemma"),
        ({"model_type": None}, "lacks model_type"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures=.*cannot be read; of model_type llama: LlamaForCausalLM"),
        ({"hidden_act": "relu"}, "hidden_act='relu' cannot be read; the family has this activation alone: 'silu'"),
        ({"hidden_size": "32"}, "hidden_size='32' cannot be read; a positive whole number is needed"),
        ({"num_key_value_heads": 3}, r"^config.json: model.n_heads=2 is not divisible by model.n_kv_heads=3"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_type='dynamic' cannot be read; rotary types that are built: default, linear",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters lacks factor"),
        ({"rope_parameters": YARN | {"short_factor": [1.0]}}, "rope_parameters: not known here: short_factor"),
        (
            {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5 cannot be read; this family turns whole heads",
        ),
        ({"rope_interleaved": True}, "rope_interleaved=True cannot be read; queries and keys are paired by halves"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"the weights are quantised \(fp8\)"),
    ],
    ids=str,
)
def test_what_would_change_numbers_is_refused_by_name(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        config_from_hf(LLAMA | changes)


@pytest.mark.parametrize("missing", ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"])
def test_a_missing_size_is_named(missing: str):
    with pytest.raises(ConfigError, match=f"config.json lacks {missing}"):
        config_from_hf({name: value for name, value in LLAMA.items() if name != missing})


@pytest.mark.parametrize(
    ("fixture", "changes", "message"),
    [
        (
            "gemma3",
            {"layer_types": ["chunked_attention"] * 7},
            "layer_types='chunked_attention' cannot be read; known layers: sliding_attention",
        ),
        ("gemma3", {"layer_types": ["full_attention"]}, "layer_types='a list of 1' cannot be read; num_hidden_layers says 7"),
        (
            "gemma3",
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention=True cannot be read; a decoder attends to what came before",
        ),
        ("olmo2", {"clip_qkv": 8.0}, "clip_qkv=8.0 cannot be read; only OLMo 1 clips"),
        ("qwen2", {"use_mrope": True}, "use_mrope=True cannot be read"),
        (
            "gpt-oss",
            {"experts_per_token": 4},
            "experts_per_token=4 cannot be read; the file says it a second time, as num_experts_per_tok: 3",
        ),
        ("gpt-oss", {"num_experts": 16}, "num_local_experts=8 cannot be read; num_experts=16 says otherwise"),
        ("gpt-oss", {"initial_context_length": 4096}, "initial_context_length=4096 cannot be read; it is the length .*: 1024"),
        ("llama4-scout", {"moe_layers": [0, 3]}, r"moe_layers=\[0, 3\] cannot be read; layers are counted from 0 to 2"),
        ("llama4-scout", {"no_rope_layers": [1, 0]}, r"no_rope_layers=\[1, 0\] cannot be read; a 0 or a 1 for each of 3 layers"),
        (
            "llama4-scout",
            {"layer_types": ["chunked_attention"] * 3},
            "layer_types=.* cannot be read; one for each of 3 layers is needed: chunked_attention and full_attention for layers that are rotated",
        ),
        ("llama4-scout", {"attention_chunk_size": None}, r"model.layer_pattern=CN has layers within chunks \(C\) and model.chunk is none"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True cannot be read"),
        ("qwen3-moe", {"norm_topk_prob": "false"}, "norm_topk_prob='false' cannot be read; true or false is needed"),
        ("qwen3-moe", {"mlp_only_layers": ["0"]}, r"mlp_only_layers=\['0'\] cannot be read; layers are counted from 0 to 1"),
        ("qwen3-moe", {"mlp_only_layers": [2]}, r"mlp_only_layers=\[2\] cannot be read"),
        ("deepseek-v3", {"first_k_dense_replace": -1}, "first_k_dense_replace=-1 cannot be read"),
        ("deepseek-v3", {"num_nextn_predict_layers": "1"}, "num_nextn_predict_layers='1' cannot be read"),
        ("deepseek-v3", {"n_group": 8, "topk_group": 4}, "model.n_groups=8 leaves one of model.n_experts=8 in a group"),
    ],
)
def test_what_belongs_to_other_models_is_refused_by_name(fixture: str, changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        config_from_hf(fixtures.load(fixture).config | changes)


def test_what_a_file_leaves_out_is_what_transformers_takes():
    gemma = fixtures.load("gemma").config
    assert config_from_hf({name: value for name, value in gemma.items() if name != "tie_word_embeddings"}).tie_embeddings
    assert not config_from_hf({name: value for name, value in LLAMA.items() if name != "tie_word_embeddings"}).tie_embeddings
    mistral: Any = config_from_hf({name: value for name, value in fixtures.load("mistral").config.items() if name != "sliding_window"})
    assert mistral.window == 4096, "a file must say null to have no window"
    mixtral: Any = config_from_hf({name: value for name, value in fixtures.load("mixtral").config.items() if name != "sliding_window"})
    assert mixtral.window is None, "Mixtral's need not"
    qwen3: Any = config_from_hf({name: value for name, value in fixtures.load("qwen3").config.items() if name != "head_dim"})
    assert qwen3.head_dim == 128
    wide: Any = config_from_hf({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 2560}})
    assert (wide.n_heads, wide.n_kv_heads, wide.head_dim, wide.vocab_size, wide.window, wide.tie_embeddings) == (
        8,
        4,
        256,
        262_208,
        4096,
        True,
    )


def test_gemma_1_files_that_say_gelu_mean_the_tanh_form():
    """The published files say gelu, and the model was trained with the approximation."""
    gemma = config_from_hf(fixtures.load("gemma").config | {"hidden_act": "gelu"})
    assert gemma == config_from_hf(fixtures.load("gemma").config)
    assert gemma.to_hf()["hidden_act"] == "gelu_pytorch_tanh"


def test_gpt_oss_files_that_say_nothing_of_rotary_positions_mean_the_published_ones():
    raw = {name: value for name, value in fixtures.load("gpt-oss").config.items() if name not in ("rope_parameters", "swiglu_limit")}
    read: Any = config_from_hf(raw)
    assert (read.rope_theta, read.swiglu_limit) == (150_000.0, 7.0)
    scaling = read.rope_scaling
    assert (scaling.factor, scaling.original_length, scaling.beta_fast, scaling.beta_slow, scaling.truncate) == (
        32.0,
        4096,
        32.0,
        1.0,
        False,
    )


def test_llama_4_layers_by_default():
    """Every fourth is not rotated and sees everything; an empty list says nothing, and a list of layers with experts counts before their step."""
    raw = fixtures.load("llama4-scout").config | {"num_hidden_layers": 8, "layer_types": None, "no_rope_layers": []}
    every: Any = config_from_hf(raw | {"moe_layers": None, "interleave_moe_layer_step": 2})
    assert (every.layer_pattern, every.ffn_pattern) == ("CCCN", "DM")
    listed: Any = config_from_hf(raw | {"moe_layers": [0], "interleave_moe_layer_step": 2, "no_rope_layer_interval": 3})
    assert (listed.layer_letters(), listed.ffn_pattern) == ("CCNCCNCC", "MDDDDDDD")
    assert not any(config_from_hf(raw | {"moe_layers": []}).mixture_layers())  # type: ignore[attr-defined]


def test_theta_is_the_files_and_not_the_familys():
    qwen: Any = config_from_hf(fixtures.load("qwen3").config | {"rope_parameters": {"rope_type": "default", "rope_theta": 123_456.0}})
    assert qwen.rope_theta == 123_456.0


def test_the_head_of_a_text_model_within_another_is_as_the_whole_says():
    """Transformers writes the class's own default, a tied head, into the part even where the whole has a head of its own."""
    whole = fixtures.load("gemma3-conditional").config
    for of_whole, of_part in [(False, True), (True, False), (False, False), (True, True)]:
        raw = whole | {"tie_word_embeddings": of_whole, "text_config": whole["text_config"] | {"tie_word_embeddings": of_part}}
        assert config_from_hf(raw).tie_embeddings is of_whole
    said_by_none = {name: value for name, value in whole.items() if name != "tie_word_embeddings"}
    assert config_from_hf(said_by_none).tie_embeddings


def test_what_is_said_around_a_text_model_is_refused_by_name_too():
    whole = fixtures.load("gemma3-conditional").config
    with pytest.raises(ConfigError, match=r"config.json: not known here: quantization=\{'bits': 4\}"):
        config_from_hf(whole | {"quantization": {"bits": 4}})


def test_gemma_3_as_transformers_writes_it_when_its_layers_are_all_of_one_type():
    """The two dictionaries of rotary positions then have a pair of entries beside them that nothing reads."""
    raw = fixtures.load("gemma3").config
    beside = {"rope_theta": None, "rope_type": "default"}
    assert config_from_hf(raw | {"rope_parameters": raw["rope_parameters"] | beside}) == config_from_hf(raw)
    with pytest.raises(ConfigError, match=r"rope_parameters=.*a dictionary for full_attention and one for sliding_attention is needed"):
        config_from_hf(raw | {"rope_parameters": raw["rope_parameters"] | {"rope_theta": 1e4}})


def test_gemma_2_files_that_say_their_window_twice_say_it_alike():
    raw = fixtures.load("gemma2").config
    window = raw["sliding_window"]
    assert config_from_hf(raw | {"sliding_window_size": window}) == config_from_hf(raw)
    with pytest.raises(ConfigError, match=f"sliding_window_size={window + 1} cannot be read; .* say sliding_window twice: {window}"):
        config_from_hf(raw | {"sliding_window_size": window + 1})


@pytest.mark.parametrize(
    ("fixture", "kv_heads", "positions"),
    [
        ("llama-mha", None, 2048),
        ("mistral", 8, 131_072),
        ("qwen2", 32, 32_768),
        ("qwen3", 32, 32_768),
        ("gemma", 16, 8192),
        ("gemma2", 4, 8192),
        ("gemma3", 4, 131_072),
        ("olmo2", None, 2048),
        ("olmo3", None, 2048),
        ("gpt-oss", 8, 131_072),
        ("llama4-scout", 8, 131_072),
    ],
)
def test_key_value_heads_and_positions_that_a_file_leaves_out(fixture: str, kv_heads: int | None, positions: int):
    """What the family's class in transformers takes; none: as many as there are query heads, as where a file says null."""
    raw = fixtures.load(fixture).config | {"num_attention_heads": 64, "head_dim": 4}
    raw = {name: value for name, value in raw.items() if name not in ("num_key_value_heads", "max_position_embeddings")}
    left_out: Any = config_from_hf(raw)
    assert (left_out.n_kv_heads, left_out.max_positions) == (kv_heads or 64, positions)
    null: Any = config_from_hf(raw | {"num_key_value_heads": None})
    assert null.n_kv_heads == 64


def test_yarn_without_an_original_length_starts_from_the_length_the_family_has():
    raw = {name: value for name, value in LLAMA.items() if name != "max_position_embeddings"}
    llama: Any = config_from_hf(raw | {"rope_parameters": YARN})
    assert llama.rope_scaling.original_length == 2048


def test_how_old_files_say_that_tokens_are_drawn_does_not_stand_in_the_way():
    older = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_length": 4096, "_flash_attn_2_enabled": True, "tokenizer_class": "X"}
    assert config_from_hf(LLAMA | older) == config_from_hf(LLAMA)


ODD: list[Any] = [
    None,
    "",
    "x",
    -1,
    0,
    1.5,
    float("nan"),
    float("inf"),
    True,
    [],
    [1],
    {},
    {"a": 1},
    {"rope_type": "yarn"},
    {"type": "llama3"},
]
SAID_SELDOM = {
    *("mlp_only_layers", "decoder_sparse_step", "num_nextn_predict_layers", "topk_method", "scoring_func"),
    *("architectures", "quantization_config", "layer_types", "max_window_layers", "query_pre_attn_scalar", "rope_local_base_freq"),
    *("experts_per_token", "initial_context_length", "moe_layers", "no_rope_layers", "interleave_moe_layer_step", "no_rope_layer_interval"),
    *("rope_parameters", "rope_scaling", "rope_theta", "sliding_window", "sliding_window_pattern", "text_config", "use_sliding_window"),
}


@pytest.mark.parametrize("model_type", ONE_EACH)
def test_any_value_of_any_attribute_is_read_or_refused_with_a_reason(model_type: str):
    """A damaged or hand-made file is no reason for a traceback."""
    raw = fixtures.load(ONE_EACH[model_type]).config
    for changed in _oddly(raw, SAID_SELDOM):
        try:
            config_from_hf(changed).spec()
        except ConfigError as error:
            assert str(error).startswith("config.json"), changed


def _oddly(raw: dict[str, Any], names: Set[str] = frozenset()) -> Iterator[dict[str, Any]]:
    """The dictionary with one value after the other replaced by each odd one, in the dictionaries within it too."""
    for name in sorted(names | set(raw)):
        yield from (raw | {name: value} for value in ODD)
        if isinstance(raw.get(name), dict) and name != "vision_config":
            yield from (raw | {name: inner} for inner in _oddly(raw[name]))


@pytest.mark.parametrize(
    ("fixture", "changes"),
    [
        ("qwen2-window", {"layer_pattern": "G"}),
        ("qwen3-window", {"layer_pattern": "GGS"}),
        ("gemma2", {"layer_pattern": "G", "attention_softcap": None}),
        ("gemma3", {"layer_pattern": "S", "rope_local_theta": 2e4, "query_pre_attn_scalar": 17.5, "final_softcap": 3.0}),
        ("olmo3-yarn", {"scale_sliding_rope": True}),
        ("olmo3-yarn", {"scale_sliding_rope": False}),
        ("gpt-oss", {"layer_pattern": "G", "rope_scaling": None, "attention_bias": False, "swiglu_limit": 3.5}),
        ("llama4-scout", {"layer_pattern": "RNC", "temperature": None, "ffn_pattern": "MDD", "attention_bias": True}),
        ("llama4-maverick", {"layer_pattern": "N", "ffn_pattern": "D"}),
    ],
)
def test_a_model_that_nobody_published_is_written_and_read_back_as_the_same(fixture: str, changes: dict[str, Any]):
    """A window that no layer has is none."""
    sizes = config_from_hf(fixtures.load(fixture).config).model_copy(update=changes)
    assert config_from_hf(sizes.to_hf()).spec() == sizes.spec()


def test_windows_and_chunks_that_no_layer_has_are_written_all_the_same():
    """Transformers makes the masks of GPT-OSS's windows and Llama 4's chunks whether or not a layer takes them."""
    for fixture, none, attribute in (
        ("gpt-oss", {"layer_pattern": "G", "window": None}, "sliding_window"),
        ("llama4-maverick", {"layer_pattern": "N", "chunk": None}, "attention_chunk_size"),
    ):
        sizes = config_from_hf(fixtures.load(fixture).config).model_copy(update=none)
        assert sizes.to_hf()[attribute]
        assert config_from_hf(sizes.to_hf()) == sizes
