"""Compiling for machines that are not there: the commands of both sides, what they print, and the tables made of it."""

import dataclasses
import json

import pytest

from benchmarks import __main__ as command
from benchmarks import a1_compile, a2_compile_large, ahead
from benchmarks.ahead import Memory, Outcome, Turns, Work
from benchmarks.processes import BenchmarkError
from telamon.config.load import load_run

PRINTED = """\
Jitting and compilation complete!
Finished train_compile.py successfully!
Cost analysis: {'bytes accessed0{}': 1.5}
Memory analysis: CompiledMemoryStats(generated_code_size_in_bytes=7, argument_size_in_bytes=600, output_size_in_bytes=590, \
alias_size_in_bytes=580, temp_size_in_bytes=900, host_generated_code_size_in_bytes=0, host_argument_size_in_bytes=1, \
host_output_size_in_bytes=2, host_alias_size_in_bytes=3, host_temp_size_in_bytes=4)
"""
TOO_LARGE = """\
Traceback (most recent call last):
  File "train_compile.py", line 381, in main
jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO temporaries \
(34.50G) exceeds available HBM (31.24G). HLO module: jit_train_step.
See https://openxla.org/xla/errors/error_1000 for more details.
"""
REFUSED = """\
W1130 a warning
Traceback (most recent call last):
  File "a.py", line 1, in inner
KeyError: 'first'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "b.py", line 2, in outer
jax._src.sharding.IndivisibleError: array axis 0 is partitioned 256 times,
  but the dimension size is 2880. This error occurs at source: b.py:2
--------------------
For simplicity, JAX has removed its internal frames.
"""


def compiled(peak: float, seconds: float = 10.0, host: float = 1e9) -> Outcome:
    return Outcome(seconds, int(host), Memory(arguments=int(peak * 1e9) - 5, temporaries=4, outputs=3, aliased=2))


def test_the_peak_counts_only_outputs_of_their_own():
    assert ahead.maxtext_memory(PRINTED) == Memory(arguments=600, temporaries=900, outputs=590, aliased=580)
    assert ahead.maxtext_memory(PRINTED).peak == 1510


def test_a_missing_analysis_is_no_analysis_of_nothing():
    with pytest.raises(BenchmarkError, match="no memory analysis"):
        ahead.maxtext_memory("Finished train_compile.py successfully!")


def test_a_refusal_is_one_line_of_the_last_exception():
    assert ahead.refusal_in(REFUSED) == "IndivisibleError: array axis 0 is partitioned 256 times, but the dimension size is 2880."
    assert ahead.refusal_in(TOO_LARGE) == "does not fit: HLO temporaries 34.50G of 31.24G"
    assert ahead.refusal_in("Killed") is None
    long = ahead.refusal_in("Traceback (most recent call last):\nRuntimeError: the start " + "x" * 500 + " the end\n\nAdvice.")
    assert long is not None
    assert (long[:23], long[-9:], len(long)) == ("RuntimeError: the start", "x the end", ahead.LONGEST)


def test_our_side_is_read_from_the_plan_in_json():
    compiled = {"argument_bytes": 600, "temp_bytes": 900, "output_bytes": 590, "alias_bytes": 580, "refusal": None}
    assert ahead.telamon_memory({"programs": [{"compiled": compiled}]}) == (ahead.maxtext_memory(PRINTED), None)
    refused = {"refusal": "Ran out of memory in memory space hbm. Used 34.50G of 31.24G hbm."}
    assert ahead.telamon_memory({"programs": [{"compiled": refused}]}) == (None, "does not fit: 34.50G of 31.24G")


def test_a_plan_that_broke_is_no_refusal(monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(BenchmarkError, match=r"Telamon ended with exit code 1: /bin/false -m telamon plan"):
        ahead.compile_with_telamon(a1_compile.WORK)


@pytest.mark.parametrize("work", [a1_compile.WORK, *a2_compile_large.WORKS], ids=lambda work: work.model)
def test_both_sides_are_given_the_same_work(work: Work):
    theirs = dict(part.split("=", 1) for part in work.maxtext)
    assert theirs["compile_topology"] == work.telamon[work.telamon.index("--on") + 1]
    overrides = [part for part in work.telamon if "=" in part]
    config = load_run(ahead.RUN, overrides).config
    devices = {"v6e-16": 16, "v6e-256": 256, "v5p-256": 128, "v5p-512": 256}[work.machine]
    assert config.train.batch_size == int(theirs["per_device_batch_size"]) * devices
    assert config.train.seq_len == int(theirs["max_target_length"])
    assert (config.train.remat, config.optimizer.kind, config.train.accumulate) == (theirs["remat_policy"], theirs["opt_type"], 1)
    assert config.train.compute_dtype == theirs["dtype"]
    mesh = config.mesh.filled(devices)
    assert mesh.fsdp * mesh.expert == devices and (mesh.expert == 1 or work.model == "gpt-oss-120b")
    assert config.run.compile_cache is None


def test_sides_take_turns(monkeypatch):
    order = []
    for name in ("compile_with_maxtext", "compile_with_telamon"):
        monkeypatch.setattr(ahead, name, lambda work, name=name: order.append(name[13:]) or compiled(1.0))
    ahead.turns(a1_compile.WORK, 3)
    assert order == ["telamon", "maxtext", "maxtext", "telamon", "telamon", "maxtext"]


@pytest.fixture
def no_environment(monkeypatch):
    monkeypatch.setattr(ahead, "versions", lambda: {"Telamon": {"jax": "0"}, "MaxText": {"jax": "0"}})


@pytest.mark.usefixtures("no_environment")
@pytest.mark.parametrize(("peak", "seconds", "holds"), [(9.0, 5.0, True), (9.1, 5.0, False), (9.0, 5.1, False)])
def test_a1_holds_where_both_shares_do(peak, seconds, holds):
    result = a1_compile.result(Turns([compiled(peak, seconds)] * 3, [compiled(10.0, 10.0, 2e9)] * 3, [compiled(peak, 1.0)] * 3))
    assert result.holds is holds
    assert result.figures["peak_of_maxtext"] == pytest.approx(peak / 10)
    assert result.figures["command_of_maxtext"] == seconds / 10
    assert result.figures["host_memory_of_maxtext"] == 0.5


@pytest.mark.usefixtures("no_environment")
def test_a1_takes_no_side_without_a_program():
    with pytest.raises(BenchmarkError, match=r"MaxText made no program.*out of luck"):
        a1_compile.result(Turns([compiled(1.0)], [Outcome(1.0, 1, None, "out of luck")], [compiled(1.0)]))


@pytest.mark.usefixtures("no_environment")
def test_a2_lists_what_does_not_fit():
    there, refused = a2_compile_large.WORKS[:2]
    result = a2_compile_large.result(
        {
            there: Turns([compiled(8.0)], [compiled(10.0)]),
            refused: Turns([compiled(20.0)], [Outcome(20.0, 1, None, "does not fit: 34.5G of 31.24G")]),
        }
    )
    cells = {(row[0], row[3]): row[4:6] for row in result.rows}
    assert cells["llama3.1-8b", "Telamon"] == ["8.00 + 0.00 GB; peak 8.00", "0.80"]
    assert cells["llama3.1-70b", "Telamon"][1] == ""
    assert "does not fit: 34.5G of 31.24G" in {row[4] for row in result.rows}
    assert dict(result.figures).items() >= {"fit": 2.0, "largest share of MaxText's peak": 0.8}.items()
    assert not result.holds
    assert json.dumps(dataclasses.asdict(result))


@pytest.mark.usefixtures("no_environment")
@pytest.mark.parametrize(("peak", "holds"), [(9.0, True), (9.1, False)])
def test_a2_holds_where_all_six_fit_in_less(peak, holds):
    taken = {work: Turns([compiled(peak)], [compiled(10.0)]) for work in a2_compile_large.WORKS}
    assert a2_compile_large.result(taken).holds is holds


@pytest.mark.usefixtures("no_environment")
def test_some_rows_are_shown_and_not_kept(monkeypatch, tmp_path, capsys):
    chosen = []
    result = a2_compile_large.result({a2_compile_large.WORKS[1]: Turns([compiled(8.0)], [compiled(10.0)])})
    monkeypatch.setattr(a2_compile_large, "run", lambda rounds, rows: chosen.append((rounds, rows)) or result)
    monkeypatch.setattr("sys.argv", ["benchmarks", "A2", "--rows", "llama3.1-70b", "--results", str(tmp_path)])
    command.main()
    assert chosen == [(1, ["llama3.1-70b"])]
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("sys.argv", ["benchmarks", "A2", "--rows", "llama9"])
    with pytest.raises(SystemExit):
        command.main()
    assert "A2 has no row llama9; its rows: llama3.1-8b, llama3.1-70b" in capsys.readouterr().err
