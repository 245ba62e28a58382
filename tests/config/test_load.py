"""Loading a run: the order of sources, where a value came from, refusals, and the saved config."""

import subprocess
import sys
from typing import Any

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telamon.config.load import fingerprint, load_run, plain, to_yaml
from telamon.errors import ConfigError


def refused(*overrides, source=None):
    with pytest.raises(ConfigError) as caught:
        load_run(source, ["model.family=toy", *overrides])
    message = str(caught.value)
    assert len(message.splitlines()) < 5
    return message


def test_sources_count_in_the_written_order(toy):
    config = load_run(toy, ["train.steps=60"]).config
    assert (config.train.steps, config.model.model_dump()["n_heads"], config.train.batch_size) == (60, 8, 16)


def test_an_override_beats_the_preset_and_each_value_keeps_its_origin(toy_preset):
    loaded = load_run("first", ["model.d_model=32"])
    assert loaded.config.model.d_model == 32
    assert loaded.origin("model.d_model") == "32 from the override (model.d_model=32), 64 in the preset small, 256 by default"


def test_the_same_value_from_two_sources_is_no_conflict(toy_preset):
    loaded = load_run("first", ["model.d_model=64"])
    assert loaded.config.model.d_model == 64
    assert loaded.origin("model.d_model").startswith("64 from the override (model.d_model=64), 64 in the preset small")


def test_an_override_chooses_the_preset(toy_preset, toy):
    assert load_run(toy, ["model.preset=small"]).config.model.model_dump()["n_heads"] == 8, "the run file's own size counts"
    assert load_run(None, ["model.preset=small"]).config.model.d_model == 64


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("optimizer.learning_rate=3e-4", 3e-4),
        ("optimizer.learning_rate=1", 1.0),
        ("train.steps=1_000", 1000),
        ("train.stop_at=none", None),
        ("train.stop_at=null", None),
        ("train.stop_at=", None),
        ("train.remat=none", "none"),
        ("profile.steps=10:13", "10:13"),
        ("run.name=no", "no"),
        ("run.name='010'", "010"),
        ("watch.progress=false", False),
        ("sample.prompts=[a, b]", ("a", "b")),
        ("run.name=a=b", "a=b"),
    ],
)
def test_a_value_is_what_it_looks_like(text, value):
    loaded = load_run(None, ["model.family=toy", text])
    found = loaded.value(text.partition("=")[0])
    assert found == value and type(found) is type(value)


def test_a_list_takes_an_index_a_whole_value_and_one_more_item():
    loaded = load_run(
        None, ["model.family=toy", "data.sources=[{kind: text, path: a}, {}]", "data.sources.0.path=b", "data.sources.2.weight=2"]
    )
    assert [source.path for source in loaded.config.data.sources] == ["b", None, None]
    assert loaded.origin("data.sources.0.path").startswith("'b' from the override (data.sources.0.path=b), 'a' from the override")
    assert loaded.origin("data.sources.1.path") == "none by default"
    assert "leaves a gap" in refused("data.sources.3.weight=2")


@pytest.mark.parametrize("none", ["null", "none"])
def test_an_optional_section_of_a_preset_is_changed_replaced_by_another_kind_or_left_out(none):
    def scaling(*overrides: str) -> Any:
        model: Any = load_run(overrides=["model.preset=llama3.1-8b", *overrides]).config.model
        return model.rope_scaling

    assert (scaling().kind, scaling().factor) == ("llama3", 8.0)
    assert scaling("model.rope_scaling.factor=32.0").original_length == scaling().original_length
    yarn = scaling("model.rope_scaling={kind: yarn, factor: 4.0, original_length: 8192}")
    assert (yarn.kind, yarn.factor, yarn.beta_fast) == ("yarn", 4.0, 32.0)
    assert scaling(f"model.rope_scaling={none}") is None
    assert load_run(overrides=["optimizer=null"]).config.optimizer.learning_rate, "a section that is not optional is only left empty"


@pytest.mark.parametrize("none", ["null", "none"])
def test_an_optional_section_that_a_family_has_by_default_is_changed_replaced_or_left_out_as_well(none, tmp_path):
    def model(*overrides: str) -> Any:
        return load_run(overrides=["model.family=gpt_oss", *overrides]).config.model

    assert model("model.rope_scaling.factor=8.0").rope_scaling.original_length == 4096
    assert plain(model("model.rope_scaling={kind: linear, factor: 2.0}").rope_scaling) == {"kind": "linear", "factor": 2.0}
    assert model(f"model.rope_scaling={none}").rope_scaling is None
    assert model(f"model.rope_scaling={none}", "model.rope_scaling={kind: linear, factor: 2.0}").rope_scaling.factor == 2.0
    written = load_run(overrides=["model.family=llama4", f"model.temperature={none}"]).config
    (tmp_path / "config.yaml").write_text(to_yaml(written))
    assert load_run(tmp_path / "config.yaml").config.model == written.model


def test_a_misspelt_key_is_refused_with_the_nearest_one():
    assert refused("optimizer.learning_rat=1") == "unknown key optimizer.learning_rat; did you mean optimizer.learning_rate?"
    assert "did you mean optimizer.learning_rate?" in refused("learning_rate=1")
    assert "did you mean model.n_kv_heads?" in refused("model.kv_heads=1")
    assert "telamon config explain train" in refused("train.zzzzzz=1")


def test_a_refusal_in_a_file_names_the_file(tmp_path):
    path = tmp_path / "wrong.yml"
    path.write_text("train: {steps: 2.5, batch: 3}\neval: {every: x}\n", encoding="utf-8")
    message = refused(source=path)
    assert message.startswith(f"train.steps=2.5 (in {path}) must be an integer, not a fraction\nand 2 more: train.batch, eval.every")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("train.steps=true", ["train.steps=true", "an integer"]),
        ("train.steps='5'", ["train.steps='5'", "an integer", "text"]),
        ("run.name=1", ["run.name=1 must be text, not an integer", """as text it is run.name='"1"'"""]),
        ("train.steps=0", ["train.steps=0", "greater than 0"]),
        ("optimizer.learning_rate=.inf", ["optimizer.learning_rate=inf", "finite"]),
        ("data.packing=spli", ["data.packing='spli'", "'split', 'drop_tail'", "did you mean 'split'?"]),
        ("optimizer=3", ["optimizer=3", "section"]),
        ("train.steps.x=3", ["train.steps", "an integer", "a section"]),
        ("train.seq_len=null", ["train.seq_len=none", "an integer"]),
        ("data.sources=[]", ["data.sources=[] must hold at least 1 item"]),
        ("data.sources.0.kind=text", ["data.sources.0", "needs a path"]),
        ("model.family=toi", ["model.family='toi'", "'toy'"]),
        ("model.family=[toy]", ["model.family"]),
        ("train.steps=[", ["train.steps=[", "not valid YAML"]),
        ("train={steps: 1, steps: 2}", ["'steps'", "twice"]),
        ("train", ["'train'", "key=value"]),
        ("=1", ["key=value"]),
    ],
)
def test_a_refusal_names_the_field_the_value_and_what_is_allowed(text, parts):
    message = refused(text)
    assert all(part in message for part in parts), message


def test_one_fault_in_a_list_is_counted_once():
    assert refused("data.sources.0.wieght=1") == "unknown key data.sources.0.wieght; did you mean data.sources.0.weight?"


def test_sources_that_are_not_there(tmp_path):
    assert "cannot read the config" in refused(source=tmp_path / "absent.yml")
    assert "did you mean" in refused(source="firs") or "there are" in refused(source="firs")
    assert "no config file" in refused(source="some/where")
    assert "without a config.yaml" in refused(source=tmp_path)
    (tmp_path / "list.yml").write_text("[1]", encoding="utf-8")
    assert "got a list" in refused(source=tmp_path / "list.yml")
    (tmp_path / "latin.yml").write_bytes(b"run: {name: \xe9}")
    assert "latin.yml" in refused(source=tmp_path / "latin.yml")


def test_the_saved_config_gives_an_equal_one_whatever_became_of_the_preset(toy_preset, tmp_path):
    config = load_run("first", ["run.name='3e-4'", "optimizer.eps=1e-9", "sample.prompts=['a: b', ' ', none]"]).config
    (tmp_path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    (tmp_path / "models/small.yml").write_text("family: toy\nd_model: 999\nn_layers: 1\n", encoding="utf-8")
    again = load_run(tmp_path / "config.yaml").config
    assert again == config and type(again.model) is type(config.model)
    assert fingerprint(again) == fingerprint(config)
    (tmp_path / "models/small.yml").unlink()
    assert load_run(tmp_path).config == config, "a run directory stands for its config, and needs no preset"
    assert load_run(tmp_path, ["train.steps=7"]).config.train.steps == 7
    with pytest.raises(ConfigError, match="holds every size already"):
        load_run(tmp_path, ["model.preset=other"])


def test_fingerprints_tell_configs_apart(toy):
    prints = {fingerprint(load_run(toy, overrides).config) for overrides in ([], ["train.seed=1"], ["model.n_heads=4"], ["train.seed=0"])}
    assert len(prints) == 3


def test_a_saved_config_is_read_from_a_url(toy):
    config = load_run(toy).config
    with fsspec.open("memory://somewhere/config.yaml", "w") as file:
        file.write(to_yaml(config))  # pyright: ignore[reportAttributeAccessIssue]
    assert load_run("memory://somewhere/config.yaml").config == config


def test_loading_touches_no_device_and_writes_nothing(tmp_path):
    (tmp_path / "blocks.py").write_text(
        "from pydantic import Field\nfrom telamon.config.registry import register_family\nfrom telamon.config.schema import ModelConfig\n"
        "@register_family\nclass Mine(ModelConfig):\n    family: str = Field(default='mine', description='.')\n",
        encoding="utf-8",
    )
    program = (
        "import sys; from telamon.config.load import load_run, to_yaml\n"
        "loaded = load_run(None, ['model.family=mine'], imports=['blocks'])\n"
        "assert loaded.config.run.imports == ('blocks',), loaded.config.run\n"
        "assert 'jax' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-B", "-c", program], cwd=tmp_path, check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["blocks.py"]


def test_a_module_that_is_not_there_is_refused():
    assert "--import no_such_blocks" in refused("run.imports=[no_such_blocks]")
    with pytest.raises(ConfigError, match="--import no_such_blocks"):
        load_run(None, imports=["no_such_blocks"])


KEYS = st.sampled_from(
    [
        "train.steps",
        "optimizer.learning_rate",
        "data.sources.0.path",
        "data.sources",
        "model",
        "model.family",
        "model.preset",
        "run.imports",
        "mesh.data",
    ]
)


@settings(max_examples=300)
@given(st.lists(st.one_of(st.text(), st.builds("{}={}".format, st.one_of(KEYS, st.text()), st.text("[]{}:,-&*!<>|'\"# ae1.\n")))))
def test_any_override_gives_a_config_or_a_refusal(overrides):
    try:
        load_run(None, ["model.family=toy", *overrides])
    except ConfigError as error:
        assert len(str(error).splitlines()) < 5


def test_rows_before_a_step_follow_the_ramp():
    train = load_run(None, ["model.family=toy", "train.batch_size=2", "train.batch_ramp=[{step: 3, batch_size: 4}]"]).config.train
    assert [train.rows_before(step) for step in range(6)] == [0, 2, 4, 6, 10, 14]


@pytest.mark.parametrize("name", ["../outside", "a/b", "..", "."])
def test_a_run_name_that_would_leave_the_root_is_refused(name: str):
    with pytest.raises(ConfigError, match=r"run\.name"):
        load_run("tiny", [f"run.name='{name}'"])
