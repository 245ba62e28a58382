"""Compiled steps in a file: the same bits as those compiled anew, and refused wherever anything is another."""

import hashlib
import importlib
import json
import re
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest
import tiny

from telamon.config.schema import OptimizerConfig, RampStage
from telamon.errors import ConfigError
from telamon.models.mixture import MixtureSizes
from telamon.plan import saved
from telamon.plan.saved import Header, load_programs, save_programs, step_rows, uncached
from telamon.train.job import Job, make_job
from telamon.train.placement import place

RAMP = (RampStage(step=10, batch_size=4),)


def job(**changes) -> Job:
    return make_job(tiny.run(**changes), devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A job with two sizes of a batch, and the file of its steps."""
    made = job(batch_ramp=RAMP)
    path = tmp_path_factory.mktemp("saved") / "step.telamon"
    with uncached():
        save_programs(made, {rows: made.train_step(rows) for rows in step_rows(made.config)}, path)
    return made, path


def step(of: Job, rows: int) -> dict[str, np.ndarray]:
    """What two steps leave behind: state and metrics, by name."""
    state = of.fresh_state()
    batch = place(tiny.batch([[16]] * rows, length=16), token_bytes=np.ones(64, np.int32), mesh=of.mesh)
    metrics = {}
    for _ in range(2):
        state, metrics = of.train_step(rows)(state, batch)
    leaves = jax.tree_util.tree_leaves_with_path((state.weights, state.optimizer, metrics))
    return {jax.tree_util.keystr(name): np.asarray(leaf) for name, leaf in leaves}


def test_steps_from_a_file_are_those_compiled_to_the_bit(compiled):
    fresh, path = compiled
    loaded = job(batch_ramp=RAMP)
    loaded = replace(loaded, ready=load_programs(loaded, path))
    assert step_rows(fresh.config) == (4, 8)
    for rows in (8, 4):
        ours, theirs = step(loaded, rows), step(fresh, rows)
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(ours[name], theirs[name]) for name in ours), rows
    assert ("train", 8) not in loaded._programs, "it was compiled all the same"


def test_what_does_not_shape_the_program_may_change(compiled):
    _, path = compiled
    assert load_programs(job(seed=3, log_every=1, stop_at=5), path).steps.keys() == {4, 8}  # of the two sizes it needs one


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seq_len": 32}, "train.seq_len: 16 in the file, 32 in this run"),
        ({"batch_size": 16}, "rows a step (train.batch_size): 4 and 8 in the file, 16 in this run"),
        ({"steps": 40}, "train.steps: 20 in the file, 40 in this run"),
        ({"model": {"d_ff": 64}}, "model.d_ff: 48 in the file, 64 in this run"),
        ({"optimizer": OptimizerConfig(learning_rate=0.5)}, "optimizer.learning_rate: 0.001 in the file, 0.5 in this run"),
        (
            {"xla_flags": {"xla_backend_optimization_level": 2}},
            "the XLA option xla_backend_optimization_level: 1 in the file, 2 in this run",
        ),
        (
            {"xla_flags": {"xla_cpu_enable_fast_math": True}},
            "the XLA option xla_cpu_enable_fast_math: nothing in the file, True in this run",
        ),
    ],
)
def test_another_config_is_refused_with_both_values(compiled, changes, named):
    _, path = compiled
    with pytest.raises(ConfigError, match=re.escape(named)):
        load_programs(job(**changes), path)


def test_other_devices_are_refused_with_both_numbers(compiled):
    _, path = compiled
    with pytest.raises(ConfigError, match=r"devices, count: 1 in the file, 2 in this run"):
        load_programs(make_job(tiny.run(), devices=jax.devices()[:2]), path)


def test_other_versions_other_code_and_another_kind_of_device_are_refused(compiled, monkeypatch):
    fresh, path = compiled
    there = Header.of(fresh)
    elsewhere = Header(
        devices={**there.devices, "kind": "TPU v6 lite"},
        versions={**there.versions, "jax": "0.0.1"},
        sources={**there.sources, "telamon": "0" * 16},
        config=there.config,
        mesh=there.mesh,
        flags=there.flags,
    )
    monkeypatch.setattr(saved.Header, "of", classmethod(lambda cls, job: elsewhere))
    with pytest.raises(ConfigError) as refused:
        load_programs(fresh, path)
    text = str(refused.value)
    assert "devices, kind: cpu in the file, TPU v6 lite in this run" in text
    assert f"the version of jax: {jax.__version__} in the file, 0.0.1 in this run" in text
    assert "the source of telamon: " in text and "telamon plan --save" in text


def test_a_family_of_ones_own_counts_by_its_code(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "blocks_of_mine.py"
    module.write_text("A = 1\n")
    first = saved._sources(("blocks_of_mine",))
    module.write_text("A = 2\n")
    importlib.invalidate_caches()
    assert first.keys() == {"telamon", "blocks_of_mine"}
    assert saved._sources(("blocks_of_mine",))["blocks_of_mine"] != first["blocks_of_mine"]
    sys.modules.pop("blocks_of_mine")


def test_a_package_of_ones_own_counts_with_all_its_modules(tmp_path, monkeypatch):
    """`--import mine.family`, whose blocks are in a module beside it."""
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "package_of_mine"
    folder.mkdir()
    for name in ("__init__", "family", "blocks"):
        (folder / f"{name}.py").write_text("A = 1\n")
    before = [saved._sources((name,))[name] for name in ("package_of_mine.family", "package_of_mine")]
    (folder / "blocks.py").write_text("A = 2\n")
    after = [saved._sources((name,))[name] for name in ("package_of_mine.family", "package_of_mine")]
    assert all(x != y for x, y in zip(before, after, strict=True))
    sys.modules.pop("package_of_mine")


@pytest.mark.parametrize(
    "changes",
    [
        {"flags": None},
        {"mesh": [1, 2]},
        {"programs": None},
        {"programs": [{"rows": 8}]},
        {"programs": [{"rows": 8, "bytes": 1, "metrics": []}]},
        {"programs": [{"rows": 8, "bytes": "many", "metrics": []}]},
        {"another": {}},
        "text",
        [],
    ],
)
def test_a_whole_file_with_another_header_is_refused_and_nothing_in_it_is_run(compiled, tmp_path, monkeypatch, changes):
    """As another version of this library would write it: the checksum is right."""
    fresh, path = compiled
    monkeypatch.setattr(saved.serialize_executable, "deserialize_and_load", lambda *a, **k: pytest.fail("run"))
    content = path.read_bytes()
    body = content[len(saved._MAGIC) + saved._DIGEST :]
    end = saved._LENGTH + int.from_bytes(body[: saved._LENGTH])
    head = json.loads(body[saved._LENGTH : end])
    head = {**head, **changes} if isinstance(changes, dict) else changes
    text = json.dumps(head).encode()
    body = len(text).to_bytes(saved._LENGTH) + text + body[end:]
    other = tmp_path / "other"
    other.write_bytes(saved._MAGIC + hashlib.sha256(body).hexdigest().encode() + body)
    with pytest.raises(ConfigError, match=r"another version of telamon.*telamon plan --save"):
        load_programs(fresh, other)


def test_every_setting_that_is_left_out_of_the_comparison_exists():
    keys = {f"{section}.{name}" for section in ("model", "train") for name in _fields(section)}
    assert keys >= saved._BESIDE


def _fields(section: str) -> set[str]:
    return set(MixtureSizes.model_fields) if section == "model" else set(type(tiny.run().train).model_fields)


@pytest.mark.parametrize("cut", [1, 10, 1000])
def test_a_cut_file_is_refused(compiled, tmp_path, cut):
    fresh, path = compiled
    content = path.read_bytes()
    short = tmp_path / "short"
    short.write_bytes(content[: len(content) - cut])
    with pytest.raises(ConfigError, match="cut or damaged"):
        load_programs(fresh, short)


def test_a_damaged_a_foreign_and_an_absent_file_are_refused_and_nothing_in_them_is_run(compiled, tmp_path, monkeypatch):
    fresh, path = compiled
    opened = []
    monkeypatch.setattr(saved.serialize_executable, "deserialize_and_load", lambda *a, **k: opened.append(a))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "damaged").write_bytes(content)
    (tmp_path / "foreign").write_bytes(b"\x80\x04 some pickle")
    for name, reason in (("damaged", "cut or damaged"), ("foreign", "no compiled program"), ("absent", "No such file")):
        with pytest.raises(ConfigError, match=reason):
            load_programs(fresh, tmp_path / name)
    with pytest.raises(ConfigError, match="seq_len"):
        load_programs(job(seq_len=32), path)
    assert not opened


def test_a_file_cannot_be_written_where_a_folder_is_missing_a_right(compiled, tmp_path):
    fresh, _ = compiled
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        save_programs(fresh, {rows: fresh.train_step(rows) for rows in (4, 8)}, tmp_path / "file" / "below")


def test_the_header_is_plain_json(compiled):
    _, path = compiled
    header, entries, _ = saved._read(path)
    assert json.loads(json.dumps(header.config)) == header.config
    assert [entry["rows"] for entry in entries] == [4, 8]
    assert {"loss", "grad_norm", "tokens"} <= set(entries[0]["metrics"])
