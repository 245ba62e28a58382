"""Compilations that stop once memory is assigned: what is read of them, and when they go on."""

import json
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from telamon.plan import assigned, worker
from telamon.plan.aot import too_large
from telamon.plan.assigned import dump_options, ends_when_assigned, read_sizes
from telamon.plan.topology import parse_topology

_BUFFERS = """BufferAssignment:
allocation 0: size 7, color 8, page 0, thread-local:
 value: <2571 call-start.1{2} @8> (size=4,offset=0): u32[]{:S(8)}
allocation 1: size 1000, page 0, parameter 1, shape |f32[2,(5)]| at ShapeIndex {}, maybe-live-out:
 value: <3718 param.77 @0> (size=1000,offset=0): f32[2,5]{1,0:T(8,128)}
allocation 2: size 300, page 0, parameter 2, shape |s32[2,5]| at ShapeIndex {}:
allocation 3: size 5000, color 5, page 0, parameter 3, shape |f32[2,5]| at ShapeIndex {}, maybe-live-out:
allocation 4: size 40, page 0, constant:
allocation 5: size 20, page 0, maybe-live-out:
allocation 6: size 1, page 0, output shape is |(f32[2,5], f32[])|, maybe-live-out:
allocation 7: size 16385, page 0, preallocated-temp:
allocation 8: size 123456, color 1, page 0, preallocated-temp:
allocation 9: size 600, color 5, page 0, preallocated-temp:
"""
_MODULE = "module_0000.jit_f.cl_1.after_optimizations"
_WHOLE = "HloModule f\n\nENTRY %f (x: f32[]) -> f32[] {\n  ROOT %x = f32[] parameter(0)\n}\n\n"


def test_the_sizes_are_read_off_a_buffer_assignment():
    """HBM has no color, the host's memory the fifth; vector memory, constants and what is a thread's own do not count."""
    assert read_sizes(_BUFFERS) == {
        "argument_bytes": 1300,
        "output_bytes": 1021,
        "alias_bytes": 1000,
        "temp_bytes": 32768,
        "code_bytes": 0,
        "host_bytes": 5600,
        "peak_bytes": 1300 + 21 + 32768,
    }


def test_a_process_ends_when_the_last_file_is_whole_and_not_before(tmp_path, monkeypatch):
    ends = []
    monkeypatch.setattr(assigned.os, "_exit", ends.append)
    reply, file, buffers = (
        tmp_path / name for name in ("reply.json", f"{_MODULE}_after_buffer_assignment.txt", f"{_MODULE}-buffer-assignment.txt")
    )
    with ends_when_assigned(tmp_path, reply, lambda: {"known": 1}):
        for assignment, program in ((_BUFFERS, _WHOLE[:-10]), ("in words of another version", _WHOLE)):
            buffers.write_text(assignment)
            file.write_text(program)
            time.sleep(0.3)
            assert not ends and not reply.exists()
        buffers.write_text(_BUFFERS)
        until = time.monotonic() + 10
        while not ends and time.monotonic() < until:
            time.sleep(0.02)
    assert set(ends) == {0} and json.loads(reply.read_text()) == {"known": 1}


@pytest.mark.parametrize("known", [True, False], ids=["no such files", "no such option"])
def test_where_the_compiler_cannot_be_stopped_all_is_compiled(tmp_path, known):
    """CPU's compiler takes the options and writes other files; one that does not know an option says so as XLA does."""
    lowered = jax.jit(lambda x: x + 1).lower(1.0)

    def compile(compiler_options):
        assert compiler_options == dump_options(tmp_path)
        if not known:
            raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: No such compile option: 'xla_dump_to'")
        return lowered.compile(compiler_options={key: value for key, value in compiler_options.items() if "compact" not in key})

    config = SimpleNamespace(train=SimpleNamespace(xla_flags={}))
    job: Any = SimpleNamespace(flags={}, config=config, compiled=lambda lowered: "all of it")
    wanted = {"dump": str(tmp_path), "reply": str(tmp_path / "reply.json")}
    compiled = worker._compiled(SimpleNamespace(compile=compile), job, (), wanted)
    assert compiled(1.0) == 2.0 if known else compiled == "all of it"
    assert any(tmp_path.iterdir()) == known and not (tmp_path / "reply.json").exists()


def test_a_peak_above_what_a_program_may_use_is_refused():
    chip = replace(parse_topology("v5e:1x1").chip, hbm_gib=1.0)
    assert too_large(2**30, chip) is None and too_large(2**40, None) is None
    assert too_large(3 * 2**29, chip) == "it needs 1.50 GiB of the 1.00 GiB that a program may use of a TPU v5e"
