"""MaxText's settings as a run's. The files are of our own writing, in MaxText's words (release 0.2.5)."""

from pathlib import Path
from typing import Any

import pytest

from telamon.config import presets, yamlio
from telamon.config.load import load_run
from telamon.config.maxtext.convert import Converted, convert
from telamon.config.maxtext.model import BLOCKS
from telamon.config.maxtext.settings import vocabulary
from telamon.config.schema import RunConfig
from telamon.errors import ConfigError

TINY = """
run_name: first
base_emb_dim: 64
base_num_query_heads: 4
base_num_kv_heads: 2
base_mlp_dim: 128
base_num_decoder_layers: 3
head_dim: 16
vocab_size: 512
steps: 40
max_target_length: 128
per_device_batch_size: 2
"""


def written(folder: Path, text: str, name: str = "mine.yml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def loaded(converted: Converted, folder: Path) -> RunConfig:
    """The run, read back from the text as `telamon train` would."""
    return load_run(written(folder, converted.text(), "run.yml")).config


def reasons(converted: Converted) -> dict[str, str]:
    return {note.key: note.reason for note in converted.notes}


def model_of(*words: str) -> Any:
    values = convert(["per_device_batch_size=1", *words], devices=1).values["model"]
    return load_run(overrides=[f"model={yamlio.dump(values)}"]).config.model


def test_a_file_becomes_a_run(tmp_path):
    converted = convert([written(tmp_path, TINY), "learning_rate=2e-3", "gradient_accumulation_steps=2"], devices=4)
    run = loaded(converted, tmp_path)
    sizes = {"d_model": 64, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "d_ff": 128, "head_dim": 16, "vocab_size": 512}
    assert run.model.family == "llama" and {name: getattr(run.model, name) for name in sizes} == sizes
    assert run.run.name == "first"
    assert (run.train.steps, run.train.seq_len, run.train.batch_size, run.train.accumulate) == (40, 128, 2 * 4 * 2, 2)
    assert run.optimizer.learning_rate == 2e-3
    assert run.data.sources[0].kind == "synthetic" and run.data.tokenizer.vocab_size == 512


def test_what_is_not_given_is_as_maxtext_has_it(tmp_path):
    """Its defaults are not ours: cosine, a tenth of warm-up, 150,001 steps of 12 rows of 2,048 tokens, blocks recomputed whole."""
    run = loaded(convert([], devices=2), tmp_path)
    assert (run.train.steps, run.train.batch_size, run.train.seq_len, run.train.remat) == (150_001, 24, 2048, "full")
    assert (run.optimizer.learning_rate, run.optimizer.b2, run.optimizer.clip_norm) == (3e-5, 0.95, 1.0)
    schedule = run.optimizer.schedule
    assert (schedule.kind, schedule.warmup_fraction, schedule.final_fraction) == ("cosine", 0.1, 0.1)
    assert (run.model.n_layers, run.model.d_model, run.model.vocab_size, run.model.tie_embeddings) == (16, 2048, 32_000, False)
    assert run.checkpoint.every == 10_000 and run.train.log_every == 100


def test_base_files_are_read_where_they_are(tmp_path):
    """The nearest file counts, words before files; MaxText's own base.yml need not be there."""
    written(tmp_path, "base_config: base.yml\nsteps: 7\nlog_period: 3\n", "common.yml")
    (tmp_path / "exp").mkdir()
    path = written(tmp_path / "exp", "base_config: ../common.yml\nsteps: 8\nadam_b1: 0.8\n")
    values = convert([path, "adam_b1=0.7"], devices=1).values
    assert (values["train"]["steps"], values["train"]["log_every"], values["optimizer"]["b1"]) == (8, 3, 0.7)
    above = written(tmp_path / "exp", "base_config: common.yml\n", "other.yml")
    assert convert([above], devices=1).values["train"]["steps"] == 7


@pytest.mark.parametrize(
    ("files", "words", "message"),
    [
        ({"a.yml": "step: 3"}, ["a.yml"], "step is not a setting of MaxText .*did you mean steps"),
        ({}, ["ici_fdsp_parallelism=2"], "did you mean ici_fsdp_parallelism"),
        ({}, ["model_name=llama3.1-9b"], "did you mean llama3.1-8b"),
        ({}, ["model_name=deepseek4-284b"], "not in this version"),
        ({}, ["decoder_block=qwen3_next"], "decoder_block=qwen3_next is not in this version.*llama2"),
        ({"a.yml": "base_config: b.yml"}, ["a.yml"], "base_config=b.yml: there is no file"),
        ({"a.yml": "base_config: a.yml"}, ["a.yml"], "builds on itself"),
        ({"a.yml": "", "b.yml": ""}, ["a.yml", "b.yml"], "two files are named"),
        ({}, ["c.yml"], "cannot read the config c.yml"),
        ({}, ["per_device_batch_size=0.25"], "less than a row on 1 device; .*--devices"),
        ({}, ["global_parameter_scale=3"], "not a power of two"),
        ({}, ["steps=many"], "train.steps='many' must be an integer"),
        ({}, ["base_num_kv_heads=3"], "n_heads=16 is not divisible by model.n_kv_heads=3"),
        ({}, ["dataset_type=grain", "grain_file_type=parquet", "grain_train_files=a.parquet,much"], "what follows the comma is a weight"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(tmp_path, monkeypatch, files, words, message):
    monkeypatch.chdir(tmp_path)
    for name, text in files.items():
        written(tmp_path, text, name)
    with pytest.raises(ConfigError, match=message):
        convert(words, devices=1)


def test_every_setting_that_is_not_carried_is_named_with_a_reason(tmp_path):
    given = "scan_layers: false\nquantization: int8\nici_context_parallelism: 2\nuse_dpo: true\nhf_access_token: geheim\nsteps: 5\n"
    converted = convert([written(tmp_path, given), "attention=flash", "hf_access_token=geheim"], devices=1)
    assert set(reasons(converted)) == {
        *("scan_layers", "quantization", "ici_context_parallelism", "use_dpo", "hf_access_token", "attention"),
        "adam_weight_decay",  # carried, and it means a little less here
    }
    assert "mesh.tensor" in reasons(converted)["ici_context_parallelism"]
    text = converted.text()
    assert all(f"# - {key}=" in text for key in reasons(converted))
    assert "geheim" not in text and "geheim" not in str([str(note) for note in converted.notes]), "a token is not shown"


def test_settings_at_their_defaults_are_not_listed(tmp_path):
    """As in a run of MaxText's own base.yml, which gives every setting."""
    everything = yamlio.dump({key: tuple(value) if isinstance(value, list) else value for key, value in vocabulary().defaults.items()})
    assert set(reasons(convert([written(tmp_path, everything)], devices=1))) == {"adam_weight_decay"}


def test_settings_that_agree_with_what_is_here_are_not_listed():
    assert set(reasons(convert(["enable_dropout=false", "rope_interleave=false"], devices=1))) == {"adam_weight_decay"}


def test_a_setting_that_another_makes_idle_is_listed():
    assert "makes use of it" in reasons(convert(["wsd_decay_steps_fraction=0.3"], devices=1))["wsd_decay_steps_fraction"]


# Models


def test_every_named_model_is_a_preset_that_is_here():
    table = yamlio.read(presets.ROOT / "maxtext" / "models.yml")
    assert set(table["presets"].values()) <= set(presets.names("models"))
    assert not set(table["presets"]) & set(table["others"])


@pytest.mark.parametrize(
    ("name", "preset", "says"),
    [
        ("llama3.1-8b-Instruct", "llama3.1-8b", None),
        ("llama3.3-70b", "llama3.3-70b", "stretched by 8"),
        ("mistral-7b", "mistral-7b-v0.2", "mistral-7b-v0.1"),
        ("gemma-2b", "gemma-2b", "256,128"),
        ("gemma2-27b", "gemma2-27b", "root of 144"),
        ("gemma3-4b", "gemma3-4b", "262,208"),
        ("qwen3-4b-thinking-2507", "qwen3-4b-2507", None),
        ("olmo3-7b", "olmo3-7b", "global layers alone"),
        ("gpt3-175b", "gpt3-175b", None),
        ("mixtral-8x22b", "mixtral-8x22b", None),
        ("qwen3-30b-a3b", "qwen3-30b-a3b-2507", "release of 2507"),
        ("gpt-oss-20b", "gpt-oss-20b", None),
        ("llama4-17b-16e", "llama4-scout", "stretched by 16"),
        ("llama4-17b-128e", "llama4-maverick", None),
        ("deepseek2-16b", "deepseek-v2-lite-16b", None),
        ("deepseek2-236b", "deepseek-v2-236b", "best groups"),
        ("deepseek3-671b", "deepseek-v3-671b", "best groups"),
        ("kimi-k2-1t", "kimi-k2-1t", "selection bias"),
    ],
)
def test_a_named_model_is_the_right_architecture_and_what_differs_is_said(name, preset, says):
    """Where MaxText's own model is not what the checkpoint was trained as, the checkpoint's is taken."""
    converted = convert([f"model_name={name}", "per_device_batch_size=1"], devices=1)
    assert converted.values["model"] == {"preset": preset}
    said = " ".join(note.reason for note in converted.notes if note.key == "model_name")
    assert (says in said) if says else not said


def test_words_change_a_named_model_and_a_file_does_not(tmp_path):
    """MaxText's file of a model comes before a run's file, and words come before both."""
    path = written(tmp_path, "model_name: llama3.1-8b\nbase_mlp_dim: 512\n")
    converted = convert([path, "override_model_config=true", "base_num_decoder_layers=4", "base_emb_dim=4096"], devices=1)
    assert converted.values["model"] == {"preset": "llama3.1-8b", "n_layers": 4}
    assert "model_name=llama3.1-8b decides it" in reasons(converted)["base_mlp_dim"]


def test_a_scale_spreads_over_heads_widths_and_depth():
    """MaxText doubles heads and MLP first, then the width, then the depth: 8 is once of each, 2 is the first alone, 4 the first two."""
    base = {"n_layers": 16, "d_model": 2048, "n_heads": 16, "n_kv_heads": 16, "d_ff": 7168}
    for scale, doubled in ((2, ("n_heads", "n_kv_heads", "d_ff")), (4, ("n_heads", "n_kv_heads", "d_ff", "d_model")), (8, tuple(base))):
        model = model_of(f"global_parameter_scale={scale}")
        assert {name: getattr(model, name) for name in base} == {name: size * (2 if name in doubled else 1) for name, size in base.items()}
    assert model_of("model_name=qwen3-0.6b", "global_parameter_scale=8").n_layers == 56


@pytest.mark.parametrize("kind", BLOCKS)
def test_every_kind_of_block_builds(kind):
    words = {
        "gemma2": ["sliding_window_size=32"],
        "gemma3": ["sliding_window_size=32"],
        "olmo3": ["sliding_window_size=32", "inhomogeneous_layer_cycle_interval=4"],
        "gpt3": ["trainable_position_size=2048"],
        "gpt_oss": ["sliding_window_size=32", "inhomogeneous_layer_cycle_interval=2"],
        "llama4": ["chunk_attn_window_size=32", "nope_layer_interval=4"],
        "deepseek": ["routed_score_func=sigmoid"],
    }
    model = model_of(f"decoder_block={kind}", *words.get(kind, []))
    assert model.family == BLOCKS[kind].family and (kind == "deepseek" or model.head_dim == 128)


MIXTURE = ["num_experts=8", "num_experts_per_tok=2", "base_mlp_dim=64"]


def test_sizes_of_mixtures():
    """An expert is as wide as base_moe_mlp_dim, or else base_mlp_dim says; layers' kinds are told by periods."""
    mixtral = model_of("decoder_block=mixtral", *MIXTURE, "base_moe_mlp_dim=32")
    assert (mixtral.n_experts, mixtral.top_k, mixtral.d_ff) == (8, 2, 32)
    qwen = model_of("decoder_block=qwen3_moe", *MIXTURE, "norm_topk_prob=true")
    assert (qwen.d_expert, qwen.renormalize) == (64, True)
    words = ["inhomogeneous_layer_cycle_interval=2", "sliding_window_size=16", "attention_bias=true", "mlp_activations_limit=7.0"]
    oss = model_of("decoder_block=gpt_oss", *MIXTURE, *words)
    assert (oss.layer_pattern, oss.window, oss.swiglu_limit, oss.attention_bias) == ("SG", 16, 7.0, True)
    words = ["nope_layer_interval=4", "chunk_attn_window_size=16", "interleave_moe_layer_step=2", "base_moe_mlp_dim=32"]
    llama = model_of("decoder_block=llama4", *MIXTURE, *words, "temperature_tuning=true")
    assert (llama.layer_pattern, llama.chunk, llama.ffn_pattern, llama.d_ff, llama.d_expert) == ("CCCN", 16, "DM", 64, 32)
    assert (llama.temperature.scale, llama.temperature.floor, llama.qk_norm) == (0.1, 8192, False)


def test_sizes_of_latent_attention():
    yarn = ["rope_type=yarn", "rope_factor=40", "mscale=0.707", "max_position_embeddings=163840"]
    words = [*MIXTURE, *yarn, "kv_lora_rank=16", "q_lora_rank=0", "shared_experts=2", "first_num_dense_layers=1"]
    second = model_of("decoder_block=deepseek", "routed_score_func=softmax", *words)
    assert second.family == "deepseek_v2"
    assert (second.q_rank, second.kv_rank, second.n_shared, second.n_dense, second.n_groups) == (None, 16, 2, 1, 1)
    assert (second.rope_scaling.mscale_all_dim, second.rope_scaling.amplitude) == (0.707, 1.0)
    third = model_of("decoder_block=deepseek", "routed_score_func=sigmoid", *words, "n_routing_groups=4", "topk_routing_group=2")
    assert (third.family, third.n_groups, third.top_groups) == ("deepseek_v3", 4, 2)


@pytest.mark.parametrize(
    ("words", "experts"),
    [
        ([], None),
        (["load_balance_loss_weight=0.01"], {"balance": "sequence", "balance_weight": 0.005}),
        (["sparse_matmul=false", "capacity_factor=1.5"], {"path": "capacity", "capacity_factor": 1.5}),
        (["sparse_matmul=false"], {"path": "dense"}),
    ],
)
def test_how_mixtures_are_trained(words, experts):
    """MaxText's loads sum to one, ours to the number of chosen experts."""
    assert convert(["decoder_block=mixtral", *MIXTURE, *words], devices=1).values["train"].get("experts") == experts


def test_a_selection_bias_and_further_tokens_are_trained_at_maxtexts_rates():
    words = ["decoder_block=deepseek", "routed_score_func=sigmoid", *MIXTURE, "routed_bias_update_rate=0.01", "mtp_num_layers=1"]
    values = convert([*words, "mtp_loss_scaling_factor=0.3"], devices=1).values
    assert (values["train"]["experts"], values["train"]["mtp_weight"], values["model"]["mtp_layers"]) == ({"bias_rate": 0.01}, 0.3, 1)


def test_experts_are_split_over_their_axis():
    words = ["decoder_block=mixtral", *MIXTURE, "ici_fsdp_parallelism=2", "ici_expert_parallelism=4"]
    assert convert(words).values["mesh"] == {"data": 1, "fsdp": 2, "expert": 4, "tensor": 1}


def test_two_layers_of_gemma_2_are_one_of_maxtexts():
    model = model_of("decoder_block=gemma2", "sliding_window_size=64", "attn_logits_soft_cap=50.0", "base_num_decoder_layers=3")
    assert (model.n_layers, model.layer_pattern, model.window, model.attention_softcap, model.final_softcap) == (6, "SG", 64, 50.0, None)
    assert model.query_pre_attn_scalar == 128.0, "MaxText divides scores by the root of the head's size"


def test_what_a_family_has_no_choice_of_is_said():
    converted = convert(["decoder_block=qwen3", "logits_via_embedding=true", "mlp_activations=[gelu, linear]"], devices=1)
    assert "always has True" in reasons(converted)["use_qk_norm"]
    assert "always has ['silu', 'linear']" in reasons(converted)["mlp_activations"]
    assert "not divided" in reasons(converted)["normalize_embedding_logits"]


@pytest.mark.parametrize(
    ("words", "scaling"),
    [
        (["rope_type=default"], None),
        (["rope_linear_scaling_factor=4.0"], {"kind": "linear", "factor": 4.0}),
        (
            ["rope_type=llama3.1"],
            {"kind": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_length": 8192},
        ),
        (["rope_type=llama3.1", "rope_use_scale=false"], None),
    ],
)
def test_rotary_positions(words, scaling):
    made = model_of("rope_max_timescale=500_000", *words)
    assert made.rope_theta == 500_000.0
    assert (None if made.rope_scaling is None else made.rope_scaling.model_dump()) == scaling


def test_yarn():
    made = model_of("rope_type=yarn", "rope_factor=8", "original_max_position_embeddings=1024", "max_position_embeddings=8192")
    assert (made.rope_scaling.factor, made.rope_scaling.original_length, made.max_positions) == (8.0, 1024, 8192)
    assert made.rope_scaling.amplitude == 1.0, "MaxText leaves cosines alone unless rope_attention_scaling is set"


# Runs


def test_a_run_shorter_than_its_schedule_keeps_the_schedule():
    values = convert(["steps=30", "learning_rate_schedule_steps=100"], devices=1).values["train"]
    assert (values["steps"], values["stop_at"]) == (100, 30)
    converted = convert(["steps=100", "learning_rate_schedule_steps=30"], devices=1)
    assert converted.values["train"]["steps"] == 30 and "rate 0" in reasons(converted)["steps"]
    assert convert(["steps=-1", "learning_rate_schedule_steps=30"], devices=1).values["train"]["steps"] == 30


def test_devices_come_from_the_mesh_where_it_says_all():
    words = ["ici_fsdp_parallelism=4", "ici_tensor_parallelism=2", "dcn_data_parallelism=2", "per_device_batch_size=3"]
    converted = convert(words)
    assert converted.values["mesh"] == {"data": 1, "fsdp": 4, "tensor": 2, "cross_slice": {"data": 2, "fsdp": 1, "tensor": 1}}
    assert converted.values["train"]["batch_size"] == 3 * 16 and "per_device_batch_size" not in reasons(converted)
    slices = convert(["num_slices=4", "dcn_fsdp_parallelism=2", "per_device_batch_size=8"], devices=8).values["mesh"]["cross_slice"]
    assert slices == {"data": 2, "fsdp": 2, "tensor": 1}
    open_mesh = convert(["per_device_batch_size=3"])
    assert open_mesh.values["train"]["batch_size"] == 3 and "--devices" in reasons(open_mesh)["per_device_batch_size"]


@pytest.mark.parametrize(
    ("words", "source"),
    [
        (["dataset_type=hf", "hf_path=json", "hf_train_files=a/*.jsonl"], {"kind": "jsonl", "path": "a/*.jsonl", "field": "text"}),
        (["dataset_type=hf", "hf_path=text", "hf_train_files=a.txt"], {"kind": "text", "path": "a.txt"}),
        (
            ["dataset_type=grain", "grain_file_type=parquet", "grain_train_files=a.parquet", "train_data_columns=[body]"],
            {"kind": "parquet", "path": "a.parquet", "field": "body"},
        ),
    ],
)
def test_files_that_are_read_here_are_carried(words, source):
    converted = convert(words, devices=1)
    assert converted.values["data"]["sources"] == [source]
    assert "dataset_type" not in reasons(converted) and "tokenizer.json" in reasons(converted)["tokenizer_path"]


def test_a_mixture_keeps_its_weights():
    words = ["dataset_type=grain", "grain_file_type=parquet", "grain_train_files=a.parquet,0.3;b.parquet,0.7"]
    sources = convert(words, devices=1).values["data"]["sources"]
    assert [(source["path"], source["weight"]) for source in sources] == [("a.parquet", 0.3), ("b.parquet", 0.7)]


@pytest.mark.parametrize("words", [["dataset_type=tfds"], ["dataset_type=hf", "hf_path=allenai/c4"], ["dataset_type=grain"]])
def test_other_data_is_named_and_nothing_stands_in(words):
    converted = convert(words, devices=1)
    assert converted.values["data"]["sources"] == [{"kind": "jsonl", "path": "NAME-YOUR-DOCUMENTS.jsonl"}], (
        "never other data that are there"
    )
    assert "data.sources" in reasons(converted)["dataset_type"]
    assert {word.partition("=")[0] for word in words} <= set(reasons(converted)), "each key that was given and not carried is listed"


def test_a_tokenizer_json_is_carried(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    files = ["dataset_type=hf", "hf_path=json", "hf_train_files=a.jsonl"]
    converted = convert([*files, f"tokenizer_path={tmp_path}"], devices=1)
    assert converted.values["data"]["tokenizer"] == {"path": str(tmp_path)} and "tokenizer_path" not in reasons(converted)
    assert "tokenizer_path" in reasons(convert([*files, "tokenizer_path=google/gemma-3-4b-it"], devices=1))


@pytest.mark.parametrize(
    ("words", "packing"),
    [
        (["dataset_type=grain", "grain_packing_type=best_fit", "max_segments_per_seq=16"], {"packing": "best_fit", "max_segments": 16}),
        (["dataset_type=grain", "grain_packing_type=concat_then_split", "max_segments_per_seq=16"], {"packing": "split"}),
        (["dataset_type=tfds"], {"packing": "first_fit"}),
        (["dataset_type=tfds", "packing=false"], {"packing": "drop_tail", "max_segments": 1}),
        (["dataset_type=tfds", "use_truncation=false"], {"packing": "split"}),
    ],
)
def test_packing(words, packing):
    data = convert(words, devices=1).values["data"]
    assert {key: data[key] for key in ("packing", "max_segments") if key in data} == packing


def test_the_optimizer_and_its_schedule():
    words = ["opt_type=muon", "muon_beta=0.9", "lr_schedule_type=wsd", "wsd_decay_steps_fraction=0.3", "wsd_decay_style=cosine"]
    converted = convert([*words, "gradient_clipping_threshold=0", "adamw_mask=[norm]"], devices=1)
    made = converted.values["optimizer"]
    assert (made["kind"], made["momentum"], made["clip_norm"]) == ("muon", 0.9, None)
    assert (made["schedule"]["kind"], made["schedule"]["decay_fraction"]) == ("wsd", 0.3)
    assert "straight line" in reasons(converted)["wsd_decay_style"] and "matrices alone" in reasons(converted)["adamw_mask"]
    assert made["offload"] is False
    assert convert(["optimizer_memory_host_offload=true"], devices=1).values["optimizer"]["offload"] is True
    assert "adamw is taken" in reasons(convert(["opt_type=sgd"], devices=1))["opt_type"]


@pytest.mark.parametrize(
    ("policy", "remat", "noted"),
    [("full", "full", False), ("minimal", "dots", False), ("none", "none", False), ("save_qkv_proj", "full", True)],
)
def test_what_is_recomputed(policy, remat, noted):
    converted = convert([f"remat_policy={policy}"], devices=1)
    assert converted.values["train"]["remat"] == remat and ("remat_policy" in reasons(converted)) == noted


def test_validation_checkpoints_metrics_and_profiles():
    words = ["eval_interval=50", "eval_steps=4", "eval_per_device_batch_size=2", "checkpoint_period=25", "max_num_checkpoints_to_keep=2"]
    words += ["async_checkpointing=false", "enable_tensorboard=false", "enable_wandb=true", "profiler=xplane", "profiler_steps=3"]
    values = convert([*words, "dump_hlo=true", "base_output_directory=gs://bucket/runs", "jax_cache_dir=here"], devices=4).values
    assert values["eval"] == {"every": 50, "batches": 4, "batch_size": 8} and "val_fraction" not in values["data"]
    assert values["checkpoint"] == {"every": 25, "asynchronous": False, "keep": 2}
    assert values["watch"] == {"tensorboard": False, "wandb_project": "maxtext"}
    assert values["profile"] == {"hlo": True, "steps": "1:4"}
    assert values["run"] == {"root": "gs://bucket/runs", "compile_cache": "here"}


def test_no_validation_holds_out_no_text():
    values = convert([], devices=1).values
    assert values["data"]["val_fraction"] == 0.0 and "eval" not in values


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("enable_checkpointing=false", "enable_checkpointing"),
        ("dtype=float16", "dtype"),
        ("profiler=nsys", "profiler"),
        ("muon_weight_decay=0.2", "muon_weight_decay"),
        ("base_num_kv_heads=4", "base_num_kv_heads"),
    ],
)
def test_what_is_only_nearly_carried_is_said(word, key):
    more = {"muon_weight_decay": ["opt_type=muon"], "base_num_kv_heads": ["decoder_block=gpt3", "trainable_position_size=2048"]}
    assert key in reasons(convert([word, *more.get(key, [])], devices=1))


def test_every_setting_has_one_place():
    """Carried, or not carried for one reason: none is in two groups."""
    file = yamlio.read(presets.ROOT / "maxtext" / "settings.yml")
    groups = [file["carried"], *(group["keys"] for group in file["not_carried"])]
    keys = [key for group in groups for key in group]
    assert len(keys) == len(set(keys)) > 800
    assert set(file["agreed"]) <= set(keys)
