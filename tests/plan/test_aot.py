"""Programs compiled for absent machines, against sizes and FLOPs worked out by hand.

The model: V 64, D 32, 2 layers of 4 query and 2 key-value heads of 8, F 48. Rows of 16 tokens, two a device.
"""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from tiny import model, run

from telamon.errors import CompileError, ConfigError
from telamon.plan import aot
from telamon.plan.aot import Compiled, compile_program
from telamon.plan.child import run_child
from telamon.plan.saved import load_programs
from telamon.plan.topology import parse_topology
from telamon.plan.worker import read_refusal
from telamon.train.job import make_job

_LAYERS, _ROWS, _T, _HEADS, _HEAD = 2, 2, 16, 4, 8
_LAYER = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48
_MATRICES = _LAYERS * _LAYER + 32 * 64
_SCORES = 2 * _ROWS * _HEADS * _T * _T * _HEAD
"""FLOPs of the product of queries and keys in a layer; that of weights and values has as many."""

# Written out: kernels count as what they state of themselves, which is not what the formula says.
_RUN = run(compute_dtype="bfloat16", attention="chunked", loss="chunked", remat="none")


def _needs(module: str) -> None:
    if not (find_spec(module.partition(".")[0]) and find_spec(module)):
        pytest.skip(f"{module} is not installed")


@dataclass(frozen=True)
class Made:
    """A compiled step, and the file it was saved in."""

    step: Compiled
    file: Path


@pytest.fixture(scope="module")
def on_tpu(tmp_path_factory) -> Made:
    _needs("libtpu")
    file = tmp_path_factory.mktemp("tpu") / "step"
    return Made(compile_program(_RUN, parse_topology("v5e:2x2"), save=file, progress=False), file)


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory) -> Made:
    _needs("jax_plugins.xla_cuda13")
    file = tmp_path_factory.mktemp("gpu") / "step"
    return Made(compile_program(_RUN, parse_topology("h100:2x2"), save=file, progress=False), file)


@pytest.fixture(params=["on_tpu", "on_gpu"])
def made(request) -> Made:
    return request.getfixturevalue(request.param)


@pytest.fixture
def compiled(made) -> Compiled:
    return made.step


@pytest.mark.xdist_group("aot")
def test_a_step_saved_for_another_machine_is_not_run_here(made):
    with pytest.raises(
        ConfigError, match=r"compiled for something else:\n  devices, kind: (TPU v5 lite|NVIDIA H100 80GB HBM3) in the file"
    ):
        load_programs(make_job(_RUN), made.file)


@pytest.mark.xdist_group("aot")
def test_flops_of_the_step_are_those_of_the_formula(compiled):
    """6 for each parameter of a matrix and token; of attention two products forward and five backward, which makes the scores again."""
    assert compiled.flops == 6 * _MATRICES * _ROWS * _T + 7 * _SCORES * _LAYERS


@pytest.mark.xdist_group("aot")
def test_a_step_that_fits_says_what_it_needs(compiled):
    assert compiled.fits and compiled.refusal is None
    assert compiled.peak_bytes == (
        compiled.argument_bytes + compiled.output_bytes - compiled.alias_bytes + compiled.temp_bytes + compiled.code_bytes
    )
    assert compiled.seconds > 0 and 10**8 < compiled.host_peak_bytes < 4 * 10**9
    assert compiled.attention[0] == "attention: chunked" and "jax" in compiled.versions
    assert Compiled.from_json(json.loads(json.dumps(compiled.to_json()))) == compiled


@pytest.mark.xdist_group("aot")
def test_stopped_before_code_is_made_a_compilation_says_the_same_but_for_the_code(on_tpu):
    quick, whole = (
        dataclasses.asdict(step) for step in (compile_program(_RUN, parse_topology("v5e:2x2"), quick=True, progress=False), on_tpu.step)
    )
    assert quick["quick"] and not whole["quick"]
    assert quick["code_bytes"] == 0 and whole["peak_bytes"] - quick["peak_bytes"] == whole["code_bytes"]
    differ = ("quick", "code_bytes", "peak_bytes", "seconds", "host_peak_bytes")
    assert {key: quick[key] for key in quick if key not in differ} == {key: whole[key] for key in whole if key not in differ}


@pytest.mark.xdist_group("aot")
def test_arguments_are_a_devices_share_of_the_state_and_the_batch(on_gpu):
    """Weights and two moments in float32, split over four devices but for the norms' scales, and three int32 or float32 a token."""
    parameters = model().parameter_count
    norms = 5 * 32
    step = on_gpu.step
    assert step.argument_bytes == pytest.approx(12 * ((parameters - norms) / 4 + norms), rel=0.1)
    assert step.alias_bytes == pytest.approx(step.argument_bytes, rel=0.1)  # the new state takes the old one's place


@pytest.mark.xdist_group("aot")
def test_weights_are_gathered_over_fsdp_and_gradients_reduced_over_it(compiled):
    assert {collective.axis for collective in compiled.collectives} == {"fsdp"}
    moved = {collective.kind: collective.bytes for collective in compiled.collectives}
    assert moved["all-gather"] >= 2 * _MATRICES  # in bfloat16, once at least
    assert moved.get("reduce-scatter", 0) + moved["all-reduce"] >= 2 * _MATRICES


@pytest.mark.xdist_group("aot")
def test_the_decode_step_holds_weights_in_bfloat16_and_a_devices_share_of_the_cache():
    _needs("libtpu")
    rows, length = 64, 1024
    compiled = compile_program(_RUN, parse_topology("v5e:2x2"), "decode", batch=rows, context=length, progress=False)
    # Heads of 8 fill a sixteenth of a TPU's tile of 128, unless the compiler puts the places there, as it does.
    cache = 2 * _LAYERS * rows * length * 2 * _HEAD * 2 / 4
    assert cache < compiled.argument_bytes < 1.5 * cache
    assert compiled.alias_bytes > cache and len(compiled.attention) == 1
    one_token = 2 * _MATRICES + _LAYERS * 4 * _HEADS * _HEAD * length
    assert compiled.flops == rows // 4 * one_token  # chunks end when texts do, so a chunk's steps are not known: one is counted


@pytest.mark.xdist_group("aot")
def test_a_step_that_does_not_fit_is_told_with_the_compilers_figures():
    _needs("libtpu")
    rows = 2**22
    compiled = compile_program(run(batch_size=rows, loss_chunk=rows), parse_topology("v5e:1x1"), progress=False)
    assert not compiled.fits and compiled.refusal is not None
    assert "exceeds available HBM (15.75G)" in compiled.refusal
    assert compiled.peak_bytes > 15.75 * 2**30 and compiled.flops == 0


def test_a_config_that_does_not_fit_the_devices_is_refused_as_in_training():
    _needs("libtpu")
    with pytest.raises(ConfigError, match=r"train\.batch_size=8"):
        compile_program(run(batch_size=8), parse_topology("v5e:4x4"), progress=False)


@pytest.mark.parametrize(
    ("message", "needed", "reason"),
    [
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO temporaries (45.79G) "
            "exceeds available HBM (15.75G). HLO module: jit_train_step.\nSee https://openxla.org/xla/errors/error_1000 for more details.",
            45.79 * 2**30,
            "Ran out of memory on HBM, the total memory required for HLO temporaries (45.79G) exceeds available HBM (15.75G). "
            "HLO module: jit_train_step.",
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 34.50G of 31.24G hbm. Exceeded hbm capacity by 3.26G.\n\n"
            "Total hbm usage >= 34.76G:\n    reserved        264.00M\n\n  Largest program allocations in hbm:\n\n  1. Size: 2.00G\n"
            '     Operator: op_name="jit(train_step)/dot_general" source_file="a.py"\n     Shape: f32[128,4096,1024]{2,1,0}\n'
            "     Unpadded size: 2.00G\n     ==========================\n\n  2. Size: 1.50G\n     Shape: bf16[768,1024,1024]{2,1,0}\n",
            34.5 * 2**30,
            "Ran out of memory in memory space hbm. Used 34.50G of 31.24G hbm. Exceeded hbm capacity by 3.26G. The largest allocations: "
            "2.00G f32[128,4096,1024]{2,1,0} of jit(train_step)/dot_general; 1.50G bf16[768,1024,1024]{2,1,0}",
        ),
    ],
)
def test_a_refusal_is_read_for_what_is_needed_and_the_largest_allocations(message, needed, reason):
    assert read_refusal(message) == (math.floor(needed), reason)


_SLEEP = ["timeit", "-n1", "-r1", "import time; time.sleep(60)"]
_FILL = ["timeit", "-n1", "-r1", "full = b'x' * 400_000_000; import time; time.sleep(60)"]


@pytest.mark.parametrize(
    ("module", "bounds", "says"),
    [
        (_SLEEP, {"timeout": 0.5}, r"sleeping took longer than 0.5 s and was stopped; --timeout"),
        (_FILL, {"host_memory": 200_000_000}, r"sleeping took [\d.]+ MB of this host's memory, more than the 200.0 MB it may"),
        (["timeit", "-n1", "-r1", "import os; os.abort()"], {}, r"failed \(signal 6\)"),
        (["timeit", "-n1", "-r1", "no_such_name"], {}, r"failed \(exit code 1\); the last it said:[^$]*NameError"),
    ],
    ids=["too long", "too large", "aborted", "raised"],
)
def test_a_child_is_bounded_and_its_end_is_told(module, bounds, says):
    before = time.monotonic()
    with pytest.raises(CompileError, match=says) as caught:
        run_child(module, environment={}, what="sleeping", **{"timeout": 50, "host_memory": 10**10, **bounds}, progress=False)
    assert time.monotonic() - before < 40 and caught.value.exit_code == 7


@pytest.mark.parametrize(
    ("way", "first"),
    [(signal.SIGINT, ""), (signal.SIGKILL, "from telamon.plan.child import die_with_parent; import os; die_with_parent(os.getppid()); ")],
    ids=["ctrl-c", "killed"],
)
def test_a_child_does_not_outlive_its_parent(way, first):
    """The parent stops it where it still can; where it cannot, the child has asked the system to."""
    code = (
        "from telamon.plan.child import run_child\n"
        f"run_child(['timeit', '-n1', '-r1', '{first}import time; time.sleep(60)'], environment={{}}, what='sleeping', timeout=50, host_memory=10**10)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ}, stderr=subprocess.PIPE, text=True)
    assert parent.stderr is not None and parent.stderr.readline().strip() == "sleeping"
    children = _wait_for(lambda: psutil.Process(parent.pid).children())
    time.sleep(1.0 if first else 0.0)  # for the child to have asked, which takes an import
    parent.send_signal(way)
    parent.communicate(timeout=30)
    assert not psutil.wait_procs(children, timeout=10)[1]


def test_a_child_whose_parent_is_gone_before_it_can_ask_ends():
    code = "import os; from telamon.plan.child import die_with_parent; die_with_parent(os.getpid()); print('goes on')"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert child.returncode and not child.stdout and "is gone" in child.stderr


@pytest.mark.parametrize("reply", [None, "", '{"flops": 1', "[]x"])
def test_an_answer_that_is_missing_or_cut_is_told(monkeypatch, reply):
    """As where the temporary folder is swept while the compiler works, or the disk is full."""

    def work(module, **_):
        asked = json.loads(Path(module[1]).read_text())
        if reply is not None:
            Path(asked["reply"]).write_text(reply)

    monkeypatch.setattr(aot, "run_child", work)
    with pytest.raises(CompileError, match="answer cannot be read"):
        compile_program(_RUN, None)


def test_an_error_of_a_users_own_module_arrives_as_a_users_error(monkeypatch):
    def work(module, **_):
        Path(json.loads(Path(module[1]).read_text())["reply"]).write_text('{"error": "MyOwnError", "message": "model.rank=0 is too small"}')

    monkeypatch.setattr(aot, "run_child", work)
    with pytest.raises(ConfigError, match=r"model\.rank=0 is too small"):
        compile_program(_RUN, None)


def test_modules_that_the_parent_finds_are_found_by_the_child(monkeypatch, tmp_path):
    """Such as one beside a script that asks for a plan from another working directory."""
    (tmp_path / "beside_the_script.py").write_text("from telamon.errors import ConfigError\nraise ConfigError('found it')\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = _RUN.model_copy(update={"run": _RUN.run.model_copy(update={"imports": ("beside_the_script",)})})
    with pytest.raises(ConfigError, match=r"^found it$"):
        compile_program(config, None, progress=False)


def _wait_for(found):
    end = time.monotonic() + 20
    while not (result := found()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return result
