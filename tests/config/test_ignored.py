"""A setting is honoured or refused: those that another one makes idle are refused where somebody writes them."""

import pytest

from telamon.config import keys, registry
from telamon.config.ignored import RULES
from telamon.config.load import load_run, to_yaml
from telamon.errors import ConfigError


@pytest.mark.parametrize(
    ("idle", "beside", "working"),
    [
        ("data.sources.0.length=3", "data.sources.0.kind=stdlib", "data.sources.0.kind=synthetic"),
        ("data.sources.0.documents=3", "data.sources.0.kind=stdlib", "data.sources.0.kind=synthetic"),
        ("data.sources.0.field=body", "data.sources.0={kind: text, path: a}", "data.sources.0={kind: jsonl, path: a}"),
        ("data.tokenizer.vocab_size=600", "data.tokenizer.path=a", "data.tokenizer.path=none"),
        ("optimizer.momentum=0.9", "optimizer.kind=adamw", "optimizer.kind=muon"),
        ("optimizer.schedule.decay_fraction=0.2", "optimizer.schedule.kind=cosine", "optimizer.schedule.kind=wsd"),
        ("optimizer.schedule.final_fraction=0.2", "optimizer.schedule.kind=constant", "optimizer.schedule.kind=cosine"),
        ("optimizer.schedule.warmup_fraction=0.1", "optimizer.schedule.warmup_steps=3", "optimizer.schedule.warmup_steps=none"),
        ("train.experts.capacity_factor=2.0", "train.experts.path=dense", "train.experts.path=capacity"),
        ("train.experts.balance_weight=0.1", "train.experts.balance=none", "train.experts.balance=batch"),
        ("eval.every=3", "data.val_fraction=0.0", "data.val_fraction=0.1"),
        ("eval.batch_size=16", "data.val_fraction=0.0", "data.val_fraction=0.1"),
        ("eval.batches=3", "data.val_fraction=0.0", "data.val_fraction=0.1"),
        ("sample.prompts=[a]", "sample.tokens=0", "sample.tokens=1"),
        ("sample.temperature=1.0", "sample.tokens=0", "sample.tokens=1"),
    ],
)
def test_an_idle_setting_is_refused_where_it_is_written(idle, beside, working):
    family = "model.family=toy"
    with pytest.raises(ConfigError) as caught:
        load_run(None, [family, beside, idle])
    key = idle.partition("=")[0]
    assert all(part in str(caught.value) for part in (idle.partition("[")[0], "has no effect with", "leave it out"))
    assert load_run(None, [family, working, idle]).value(key) == load_run(None, [family, idle, working]).value(key)
    assert load_run(None, [family, working, idle, beside]), "switched away from by a later source"


def test_a_default_that_is_idle_by_itself_is_no_fault_of_the_users():
    assert load_run(None, ["model.family=toy"])
    with pytest.raises(ConfigError, match=r"optimizer.momentum=0.9 has no effect with optimizer.kind=adamw"):
        load_run(None, ["model.family=toy", "optimizer.momentum=0.9"])


def test_a_saved_config_may_hold_idle_settings(tmp_path):
    config = load_run(None, ["model.family=toy", "optimizer.kind=muon", "optimizer.momentum=0.9", "optimizer.kind=adamw"]).config
    (tmp_path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert load_run(tmp_path).config == config
    with pytest.raises(ConfigError, match="no effect"):
        load_run(tmp_path, ["optimizer.momentum=0.8"])


def test_the_rules_speak_of_keys_that_exist():
    for rule in RULES:
        family = "deepseek_v3" if rule.needs == "model.mtp_layers" else "toy"
        assert all(keys.find(registry.family(family), key) for key in (*rule.keys, rule.needs))
