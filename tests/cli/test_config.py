"""`telamon config`."""

import json

from telamon.config import presets, yamlio
from telamon.config.load import load_run


def test_what_show_prints_is_a_run_of_its_own(telamon, tmp_path):
    answer = telamon("config", "show", "tiny", "optimizer.learning_rate=3e-4")
    assert answer.code == 0
    (tmp_path / "again.yml").write_text(answer.out, encoding="utf-8")
    assert load_run(tmp_path / "again.yml").config == load_run("tiny", ["optimizer.learning_rate=3e-4"]).config


def test_origins_are_comments_beside_the_same_values(telamon):
    words = [
        "config",
        "show",
        "tiny",
        "model.d_model=64",
        "data.sources.0.weight=2",
        "sample.tokens=1",
        "sample.prompts=['a: \"b\"\n  c', '#']",
    ]
    plain, annotated = telamon(*words).out, telamon(*words, "--origins").out
    assert yamlio.parse(annotated, "annotated") == yamlio.parse(plain, "plain")
    assert "  d_model: 64  # 64 from the override (model.d_model=64), 32 in the preset tiny-llama, 256 by default\n" in annotated
    assert "    weight: 2  # 2 from the override (data.sources.0.weight=2), 1.0 by default\n" in annotated.replace("2.0", "2")
    assert "  seed: 0  # default\n" in annotated


def test_explain_says_what_a_key_means_and_where_its_value_came_from(telamon):
    answer = telamon("config", "explain", "optimizer.learning_rate", "tiny", "optimizer.learning_rate=3e-4")
    for part in ("Peak learning rate", "number > 0", "0.001", "0.0003 from the override (optimizer.learning_rate=3e-4), 0.001 by default"):
        assert part in answer.out
    assert "d_model" in telamon("config", "explain", "model").out
    assert "stdlib" in telamon("config", "explain", "data.sources.0.kind").out
    assert "weight" in telamon("config", "explain", "data.sources").out
    refused = telamon("config", "explain", "optimizer.learning_rat")
    assert refused.code == 2 and "did you mean optimizer.learning_rate?" in refused.err


def test_diff_shows_the_keys_that_differ_and_no_others(telamon):
    answer = telamon("config", "diff", "tiny", "default")
    assert "train.seq_len" in answer.out and "optimizer.b1" not in answer.out
    assert telamon("config", "diff", "tiny", "tiny").out == "no difference\n"


def test_the_schema_knows_every_section_and_family(telamon):
    schema = json.loads(telamon("config", "schema").out)
    assert set(schema["properties"]) >= {"model", "train", "optimizer"}
    families = {
        definition["properties"]["family"]["default"] for definition in schema["$defs"].values() if "family" in definition["properties"]
    }
    assert families >= {"llama", "qwen3"}


def test_a_users_family_comes_in_by_import(telamon, tmp_path, monkeypatch):
    (tmp_path / "my_own_blocks.py").write_text(
        "from pydantic import Field\nfrom telamon.config.registry import register_family\nfrom telamon.config.schema import ModelConfig\n\n\n"
        "@register_family\nclass Mine(ModelConfig):\n    family: str = Field(default='mine', description='.')\n    twist: int = Field(default=3, description='.')\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    answer = telamon("config", "show", "model.preset=none", "model.family=mine", "--import", "my_own_blocks")
    assert answer.code == 0, answer.err
    assert "  twist: 3\n" in answer.out and "  imports: [my_own_blocks]\n" in answer.out


def test_from_maxtext_writes_a_run_that_can_be_trained_and_says_what_is_lost(telamon, tmp_path):
    theirs, ours = tmp_path / "theirs.yml", tmp_path / "ours.yml"
    theirs.write_text(
        "base_emb_dim: 32\nbase_num_query_heads: 4\nbase_num_kv_heads: 2\nbase_mlp_dim: 64\nbase_num_decoder_layers: 2\nhead_dim: 8\n"
        "vocab_size: 512\nmax_target_length: 32\nsteps: 4\n",
        encoding="utf-8",
    )
    words = ("per_device_batch_size=2", "scan_layers=false", "--devices", "8")
    shown = telamon("config", "from-maxtext", theirs, *words)
    assert shown.code == 0 and "batch_size: 16" in shown.out and "# - scan_layers=false: " in shown.out
    assert "scan_layers=false: the layers always run under one scan" in shown.err
    written = telamon("config", "from-maxtext", theirs, *words, "--output", ours)
    assert written.code == 0 and written.out == "" and ours.read_text(encoding="utf-8") == shown.out
    assert written.err.splitlines()[-1] == f"{ours} is written"
    assert telamon("train", ours, "--dry-run").code == 0
    refused = telamon("config", "from-maxtext", theirs, "--output", tmp_path)
    assert refused.code == 2 and refused.err == f"cannot write {tmp_path}: Is a directory; choose another --output\n"
    assert telamon("config", "from-maxtext", theirs, "--output", "").code == 2


def test_the_name_of_a_run_is_answered_with_its_folder(telamon, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert telamon("config", "show", "first").err == f"no run preset is named 'first'; there are: {', '.join(presets.names('runs'))}\n"
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "config.yaml").touch()
    for words in (("config", "show", "first"), ("train", "first"), ("train", "resume=first"), ("train", "train.init_from=first")):
        answer = telamon(*words)
        assert answer.code == 2 and answer.err.endswith("; did you mean runs/first?\n")


def test_from_maxtext_refuses_a_word_that_maxtext_does_not_know(telamon):
    answer = telamon("config", "from-maxtext", "per_device_batch_sizes=2")
    assert answer.code == 2 and "did you mean per_device_batch_size?" in answer.err
