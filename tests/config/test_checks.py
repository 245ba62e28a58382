"""Sizes, rows and lengths against each other, and against the mesh."""

import pytest

from telamon.config.checks import check_devices
from telamon.config.load import load_run
from telamon.errors import ConfigError


def toy(*overrides):
    return load_run(None, ["model.family=toy", *overrides]).config


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        # Sizes that don't divide stop here, with both numbers, the axis and a way out.
        (["model.n_layers=30", "mesh.stage=4"], ["n_layers=30", "stage=4", "1, 2, 3, 5, 6"]),
        (["model.n_kv_heads=2", "mesh.tensor=4"], ["n_kv_heads=2", "mesh.tensor=4", "1, 2"]),
        (["model.family=llama", "model.n_heads=8", "model.n_kv_heads=3"], ["n_heads=8", "n_kv_heads=3", "[1, 2, 4, 8]"]),
        (["train.seq_len=9", "mesh.context=2"], ["seq_len=9", "context=2"]),
        # What divides but has no machinery is refused by name.
        (["model.n_layers=32", "mesh.stage=4"], ["mesh.stage=4", "not available", "mesh.stage=1"]),
        (["mesh.expert=2"], ["mesh.expert=2", "has none", "mesh.expert=1"]),
        (["model.family=mixtral", "model.n_experts=6", "mesh.expert=4"], ["n_experts=6", "mesh.expert=4", "1, 2, 3, 6"]),
        (["model.family=mixtral", "mesh.expert=4", "train.batch_size=6"], ["batch_size=6", "4 devices", "mesh.expert", "multiple of 4"]),
        (["mesh.context=2"], ["mesh.context=2", "not available"]),
        (["mesh.cross_slice.context=2"], ["mesh.context=2", "not available"]),
        # Rows.
        (["train.batch_size=6", "mesh.data=4"], ["batch_size=6", "4 devices", "multiple of 4"]),
        (["train.batch_size=8", "train.accumulate=4", "mesh.data=4"], ["accumulate=4", "2 rows", "multiple of 16"]),
        (["train.batch_ramp=[{step: 2, batch_size: 6}]", "mesh.data=4"], ["batch_size=6"]),
        (["eval.batch_size=6", "mesh.data=4"], ["eval.batch_size=6", "multiple of 4"]),
        (["train.batch_size=8", "mesh.data=2", "mesh.fsdp=2", "mesh.cross_slice.data=4"], ["batch_size=8", "16 devices"]),
        (["train.batch_size=9", "train.accumulate=2"], ["batch_size=9", "accumulate=2"]),
        # Lengths.
        (["train.steps=10", "optimizer.schedule.warmup_steps=11"], ["warmup_steps=11", "train.steps=10", "0 to 10"]),
        (["train.steps=10", "train.stop_at=11"], ["stop_at=11", "steps=10"]),
        # The mesh itself.
        (["mesh.data=-1"], ["mesh.data", "mesh.fsdp", "-1"]),
        (["mesh.data=0"], ["mesh.data=0", "at least 1"]),
        (["mesh.cross_slice.data=-1"], ["cross_slice", "data", "at least 1"]),
    ],
)
def test_what_cannot_run_is_refused_when_it_is_read(overrides, parts):
    with pytest.raises(ConfigError) as caught:
        toy(*overrides)
    message = str(caught.value)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("overrides", "devices", "sizes"),
    [
        ([], 8, (1, 8, 1)),
        (["mesh.data=2", "mesh.tensor=2"], 8, (2, 2, 2)),
        (["mesh.data=-1", "mesh.fsdp=1"], 4, (4, 1, 1)),
        (["mesh.data=2", "mesh.cross_slice.data=2"], 8, (2, 2, 1)),
        (["mesh.fsdp=1"], 1, (1, 1, 1)),
    ],
)
def test_the_free_axis_takes_the_devices_that_are_left(overrides, devices, sizes):
    mesh = check_devices(toy(*overrides), devices)
    assert (mesh.data, mesh.fsdp, mesh.tensor) == sizes


@pytest.mark.parametrize(
    ("overrides", "devices", "parts"),
    [
        ([], 5, ["batch_size=16", "5 devices"]),
        (["mesh.cross_slice.data=2", "train.batch_size=2"], 4, ["batch_size=2", "4 devices"]),
        (["mesh.fsdp=4"], 8, ["fsdp=4", "4 devices", "there are 8"]),
        (["mesh.data=3", "train.batch_size=12"], 8, ["data=3", "multiple of 3", "there are 8"]),
        (["mesh.tensor=-1", "mesh.fsdp=1"], 4, ["n_kv_heads=2", "mesh.tensor=4", "1, 2"]),
    ],
)
def test_what_does_not_fit_the_devices_is_refused_at_the_start(overrides, devices, parts):
    config = toy(*overrides)
    with pytest.raises(ConfigError) as caught:
        check_devices(config, devices)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
