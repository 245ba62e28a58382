"""What people read of a plan: units that suit the sizes, what waits on the host, XLA's options."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from telamon.config.load import load_run
from telamon.plan.aot import Compiled
from telamon.plan.hlo import Collective
from telamon.plan.plan import Plan, Request, make_plan
from telamon.plan.report import show
from telamon.plan.topology import parse_topology

_MIB, _GIB = 2**20, 2**30


@pytest.fixture(scope="module")
def plan() -> Plan:
    config = load_run("tiny", ["train.batch_size=16"]).config
    return make_plan(config, parse_topology("v5e:2x2"), Request(programs=("train",), compile=False))


def _compiled(unit: int) -> Compiled:
    return Compiled(
        argument_bytes=2 * unit,
        output_bytes=2 * unit,
        alias_bytes=2 * unit,
        temp_bytes=5 * unit,
        code_bytes=unit // 2,
        host_bytes=3 * unit // 4,
        peak_bytes=15 * unit // 2,
        fits=True,
        refusal=None,
        flops=3_000_000,
        collectives=(Collective(kind="all-gather", axis="fsdp", bytes=unit + unit // 4, count=7),),
        kernels=(("splash_" + "long_" * 20 + "name", 2),),
        attention=("attention: splash",),
        seconds=1.0,
        host_peak_bytes=_GIB,
        versions={},
        device_kind="TPU v5 lite",
        device_count=4,
        flags="xla_some_option=true",
    )


def _shown(plan: Plan, **console: object) -> str:
    out = io.StringIO()
    show(plan, Console(file=out, **{"width": 80, **console}))  # pyright: ignore[reportArgumentType]
    return out.getvalue()


def _with(plan: Plan, unit: int) -> Plan:
    from telamon.plan.memory import split_compiled

    (program,) = plan.programs
    compiled = _compiled(unit)
    return replace(plan, programs=(replace(program, compiled=compiled, memory=split_compiled(compiled, program.estimate)),))


@pytest.mark.parametrize(("unit", "name"), [(_MIB, "MiB"), (_GIB, "GiB")])
def test_sizes_are_in_a_unit_that_shows_them(plan, unit, name):
    lines = [line.split() for line in _shown(_with(plan, unit)).splitlines()]
    assert any(line[1:4] == ["in", "all", "│"] and line[4] == "7.50" for line in lines)
    assert any("host" in line and "0.75" in line for line in lines)
    assert any("code" in line and "0.50" in line for line in lines)
    assert any("all-gather" in line and "1.25" in line and "7" in line for line in lines)
    assert any(line[:6] == ["┃", "memory", "of", "a", "device", "┃"] and line[6] == name for line in lines)


def test_what_the_compiler_was_told_is_said(plan):
    shown = _shown(_with(plan, _GIB))
    assert "xla_some_option=true" in shown and "3e-06 T" in shown


def test_no_line_is_wider_than_the_screen_and_none_begins_at_its_edge_after_a_fold(plan):
    shown = _shown(_with(plan, _GIB)).splitlines()
    assert max(map(len, shown)) <= 80
    head = next(index for index, line in enumerate(shown) if line.startswith("  kernels"))
    assert shown[head + 1].startswith("     ")


def test_advice_is_given_for_what_matters(plan):
    large = _with(plan, _GIB)  # beside its temporaries, the weights of so small a model are nothing
    shown, advice = _shown(large, width=200), large.programs[0].memory.advice
    assert advice["temporaries"] in shown and advice["weights"] not in shown and "weights" in shown


def test_a_step_that_is_too_short_to_predict_says_so(plan):
    assert "so short a step waits for its host" in " ".join(_shown(plan).split())


def test_the_constants_of_the_prediction_are_given(plan):
    shown = " ".join(_shown(plan).split())
    for word in ("TPU v5e: 197 TFLOP/s", "819 GB/s", "matmul_share 0."):
        assert word in shown, word
