"""Searches for a layout: what they drop, what they find, and what they write."""

import itertools
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from telamon.config.load import Loaded, load_run
from telamon.config.schema import MeshConfig, RunConfig
from telamon.errors import ConfigError
from telamon.plan.cost import predict
from telamon.plan.layouts import Layouts, chosen
from telamon.plan.memory import estimate_memory
from telamon.plan.run_file import write_run_yaml
from telamon.plan.search import MARGIN, Candidate, search
from telamon.plan.topology import Topology, parse_topology

SIZES = ("n_layers=2", "n_heads=8", "n_kv_heads=4", "head_dim=128", "d_model=1024", "d_ff=4096", "vocab_size=32768", "tie_embeddings=false")
RUN = ("sample.tokens=0", "data.tokenizer.vocab_size=4096", "optimizer.kind=adamw", "train.seq_len=2048", "train.remat=none")


def _run(*overrides: str) -> Loaded:
    return load_run("default", (*RUN, *(f"model.{size}" for size in SIZES), *overrides))


def _sizes(candidate: Candidate) -> dict[str, int]:
    return {axis: size for axis, size in candidate.config.mesh.totals().items() if size > 1}


def test_a_model_that_fits_only_in_parts_is_sharded():
    """1.6 G parameters: float32 weights with their gradients, clipped and not, are 19 GiB, on devices of 15.75 GiB."""
    config = _run("model.n_layers=100", "train.batch_size=16").config
    found = search(config, parse_topology("v5e:2x2"))
    assert all(_sizes(candidate).get("fsdp", 1) * _sizes(candidate).get("tensor", 1) > 1 for candidate in found.candidates)
    assert found.dropped["needs more memory than a device has"] > 0
    with pytest.raises(ConfigError, match="too much"):
        search(config, parse_topology("v5e:1x1"))


def test_a_batch_of_fewer_rows_than_devices_needs_the_tensor_axis():
    found = search(_run("train.batch_size=2").config, parse_topology("v5e:2x2"))
    assert {_sizes(candidate).get("tensor", 1) for candidate in found.candidates} == {2, 4}
    assert found.dropped["the batch does not divide over data x fsdp x expert"] > 0


def test_where_nothing_fits_the_message_names_the_shortfall_and_what_would_help():
    with pytest.raises(ConfigError) as refused:
        search(_run("model.n_layers=400", "train.batch_size=4").config, parse_topology("v5e:2x2"))
    message = str(refused.value)
    for part in ("v5e:2x2", "15.75 GiB", "GiB too much", "mesh.fsdp=4", "more devices, about ", "optimizer.kind=muon"):
        assert part in message


def test_where_nothing_divides_the_message_says_why():
    """Each reason once: with other heads the batch would still not divide."""
    with pytest.raises(ConfigError, match=r"no layout .* divides over the 16 devices of v5e:4x4: model\.n_heads=1.*; train\.batch_size=3"):
        search(_run("train.batch_size=3", "model.n_heads=1", "model.n_kv_heads=1").config, parse_topology("v5e:4x4"))


def test_each_layout_is_found_or_counted_once():
    config = _run("train.batch_size=8").config
    found = search(config, parse_topology("v5e:2x2"), keep=10**6)
    layouts = [str(chosen(candidate.config)) for candidate in found.candidates]
    assert len(set(layouts)) == len(layouts)
    assert found.considered == len(layouts) + sum(found.dropped.values())


def _mixture(*overrides: str) -> RunConfig:
    return load_run("default", (*RUN, "model.preset=tiny-mixture", "train.seq_len=64", "train.batch_size=8", *overrides)).config


def test_mixtures_alone_are_split_by_experts():
    topology = parse_topology("v5e:2x2")
    dense = Layouts(_run("train.batch_size=8").config, topology, free_batch=False)
    assert {config.mesh.expert for config in dense} == {1}
    mixture = Layouts(_mixture(), topology, free_batch=False)
    assert {config.mesh.expert for config in mixture} == {1, 2, 4}


def test_what_experts_take_is_found_for_as_many_layouts_as_are_wanted(monkeypatch: pytest.MonkeyPatch):
    """It is in what they are said to need, and what is far too large is dropped without it."""
    whole: list[RunConfig] = []

    def estimate(config: RunConfig, topology: Topology, *, at_least: bool = False) -> Any:
        if not at_least:
            whole.append(config)
        return estimate_memory(config, topology, at_least=at_least)

    monkeypatch.setattr("telamon.plan.search.estimate_memory", estimate)
    found = search(_mixture(), parse_topology("v5e:2x2"), keep=2)
    assert [candidate.config for candidate in found.candidates] == whole
    topology = parse_topology("v5e:2x2")
    assert [candidate.memory for candidate in found.candidates] == [estimate_memory(config, topology) for config in whole]


def test_slices_are_joined_by_data_or_fsdp():
    found = search(_run("train.batch_size=8").config, parse_topology("2*v5e:2x2"), keep=10**6)
    across = {tuple(size for axis, size in c.config.mesh.cross_slice.sizes().items()) for c in found.candidates}
    assert across == {(2, 1, 1, 1, 1, 1), (1, 2, 1, 1, 1, 1)}


def test_a_free_batch_is_chosen_in_rows_a_device():
    found = search(_run("train.batch_size=3").config, parse_topology("v5e:2x2"), free_batch=True, keep=10**6)
    rows = {c.config.train.batch_size // (_sizes(c).get("data", 1) * _sizes(c).get("fsdp", 1)) for c in found.candidates}
    assert {1, 2, 4, 8} <= rows
    best = found.candidates[0]
    assert all(best.prediction.tokens_per_second_per_device >= c.prediction.tokens_per_second_per_device for c in found.candidates)


def test_what_is_as_fast_without_the_hosts_memory_comes_first():
    found = search(_run("train.batch_size=4").config, parse_topology("v5e:2x2"), keep=10**6)
    by_layout: dict[tuple[Any, ...], list[Candidate]] = {}
    for candidate in found.candidates:
        by_layout.setdefault((*_sizes(candidate).items(), candidate.prediction.step_seconds), []).append(candidate)
    assert any(len(alike) > 1 for alike in by_layout.values())
    for alike in by_layout.values():
        hosts = [candidate.memory.host > 0 for candidate in alike]
        assert hosts == sorted(hosts)


def test_a_host_has_no_more_for_a_device_than_the_device_itself():
    topology = parse_topology("v5e:2x2")
    found = search(_run("model.n_layers=120", "train.batch_size=1024").config, topology, keep=10**6)
    assert found.dropped["needs more of the host's memory than there may be"] > 0
    assert all(candidate.memory.host <= topology.chip.hbm_bytes for candidate in found.candidates)


def test_the_best_of_all_layouts_written_down_by_hand_is_found():
    """Every mesh of four devices, policy and number of microbatches, without a word from the search."""
    topology, loaded = parse_topology("v5e:2x2"), _run("model.n_layers=24", "train.batch_size=8")
    rates: dict[tuple[Any, ...], float] = {}
    meshes = [sizes for sizes in itertools.product((1, 2, 4), repeat=3) if prod(sizes) == 4]
    for (data, fsdp, tensor), accumulate, remat, offload in itertools.product(
        meshes, (1, 2, 4, 8), ("none", "dots", "full", "offload"), (False, True)
    ):
        mesh = MeshConfig(data=data, fsdp=fsdp, tensor=tensor)
        train = loaded.config.train.model_copy(update={"accumulate": accumulate, "remat": remat})
        optimizer = loaded.config.optimizer.model_copy(update={"offload": offload})
        config = loaded.config.model_copy(update={"mesh": mesh, "train": train, "optimizer": optimizer})
        try:
            memory = estimate_memory(config, topology)
        except ConfigError:
            continue
        if memory.total <= topology.chip.hbm_bytes * (1 - MARGIN):
            rates[data, fsdp, tensor, accumulate, remat, offload] = predict(config, topology).tokens_per_second_per_device
    found = search(loaded.config, topology, keep=10**6)
    best = found.candidates[0]
    assert best.prediction.tokens_per_second_per_device == pytest.approx(max(rates.values()))
    assert len(found.candidates) == len(rates)


def _compiler(limit_rows: int, calls: list[RunConfig]) -> Any:
    def compiler(config: RunConfig, topology: Topology) -> Any:
        calls.append(config)
        figures = {"argument_bytes": 10**9, "temp_bytes": 10**9, "output_bytes": 0, "alias_bytes": 0, "code_bytes": 5}
        return SimpleNamespace(**figures, fits=config.train.batch_size // config.train.accumulate <= limit_rows)

    return compiler


def test_the_best_are_compiled_until_enough_are_accepted():
    calls: list[RunConfig] = []
    found = search(_run("train.batch_size=8").config, parse_topology("v5e:2x2"), compile_best=2, compiler=_compiler(4, calls), keep=4)
    assert [candidate.compiled is not None for candidate in found.candidates] == [True, True, False, False]
    assert found.candidates[0].memory.code == 5
    assert found.dropped["refused by the compiler"] == len(calls) - 2 > 0


@pytest.mark.parametrize(
    "overrides", [(), ("mesh.fsdp=1", "mesh.tensor=4", "mesh.cross_slice.data=2", "train.remat=full", "train.accumulate=2")]
)
def test_the_file_is_read_back_as_the_layout_found(tmp_path: Path, overrides: tuple[str, ...]):
    loaded = _run("train.batch_size=8", "mesh.replicated_limit=0.5", *overrides)
    topology = parse_topology("v5e:2x2")
    found = search(loaded.config, topology)
    for number, candidate in enumerate(found.candidates[:3]):
        path = tmp_path / f"best{number}.yml"
        write_run_yaml(loaded, candidate, topology, path)
        text = path.read_text(encoding="utf-8")
        assert load_run(path).config == candidate.config
        assert text.startswith("# Laid out for v5e:2x2 (4 x TPU v5e)")
        assert "GiB a device, by arithmetic alone" in text
        assert "z_loss" not in text  # nobody said one
        assert "replicated_limit: 0.5" in text


def test_a_file_of_every_value_is_written_where_the_runs_own_words_do_not_suffice(tmp_path: Path):
    """The run's file is for Muon and sets its momentum, and an override takes AdamW: in one file that is refused."""
    own = tmp_path / "own.yml"
    own.write_text("model: {preset: tiny-llama}\noptimizer: {kind: muon, momentum: 0.9}\ntrain: {batch_size: 8}\n", encoding="utf-8")
    loaded, topology = load_run(own, ["optimizer.kind=adamw"]), parse_topology("v5e:2x2")
    candidate = search(loaded.config, topology).candidates[0]
    write_run_yaml(loaded, candidate, topology, tmp_path / "best.yml")
    assert load_run(tmp_path / "best.yml").config == candidate.config
    with pytest.raises(ConfigError, match=r"ends in \.yml"):
        write_run_yaml(loaded, candidate, topology, tmp_path / "best")
