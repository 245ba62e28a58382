"""What may change in a resumed run."""

import pytest

from telamon.config.load import load_run, to_yaml
from telamon.config.resume import load_resumed
from telamon.errors import ConfigError


@pytest.fixture
def run(tmp_path):
    """A run directory of width 64."""
    config = load_run(None, ["model.family=toy", "model.d_model=64", "run.name=first", "optimizer.kind=muon"]).config
    (tmp_path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    return str(tmp_path)


def test_weights_of_one_width_are_not_loaded_into_another(run):
    """Both numbers are named, and where each came from."""
    with pytest.raises(ConfigError) as caught:
        load_resumed(run, ["model.d_model=32"])
    assert f"model.d_model stays as it is in a resumed run: 32 from the override (model.d_model=32), 64 in {run}/config.yaml" in str(
        caught.value
    )


@pytest.mark.parametrize(
    "override", ["optimizer.kind=adamw", "optimizer.groups=[{match: a, learning_rate: 1}]", "run.name=second", "run.root=else"]
)
def test_what_a_resumed_run_cannot_follow_is_refused(run, override):
    with pytest.raises(ConfigError, match=override.partition("=")[0]):
        load_resumed(run, [override])


def test_the_rest_may_change_and_equal_values_are_no_change(run):
    config = load_resumed(run, ["model.d_model=64", "train.steps=5", "optimizer.learning_rate=0.1", "checkpoint.keep=1"]).config
    assert (config.train.steps, config.optimizer.learning_rate, config.model.d_model) == (5, 0.1, 64)


def test_a_run_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"resume=.*absent: no run there"):
        load_resumed(str(tmp_path / "absent"))
