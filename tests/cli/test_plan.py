"""`telamon plan`: what it says of machines that are not here, and of this one."""

import json
from importlib.util import find_spec

import pytest

from telamon.config.hardware import chips
from telamon.plan import topology

RUN = ("tiny", "train.batch_size=16", "optimizer.kind=adamw")


def test_an_estimate_says_what_fits_how_long_it_takes_and_what_it_costs(telamon):
    answer = telamon(
        "plan", "model.preset=llama3.1-8b", "train.batch_size=32", "train.steps=3600", "--on", "v6e:4x4", "--estimate", "--cost", "2.5"
    )
    assert answer.code == 0, answer.err
    for word in ("16 x TPU v6e", "fsdp 16", "weights", "of 31.24", "MFU", "$", "by arithmetic alone"):
        assert word in answer.out, word


def test_what_does_not_fit_is_said_and_ends_with_two(telamon):
    answer = telamon("plan", "model.preset=llama3.1-70b", "train.batch_size=8", "--on", "h100:8", "--estimate", "--only", "train")
    assert answer.code == 2
    assert "does not fit" in answer.out and "decoding" not in answer.out


def test_the_help_names_each_chip(telamon):
    shown = telamon("plan", "--help").out
    for chip in chips():
        assert chip.key in shown, chip.key


def test_decoding_alone_has_no_training_time(telamon):
    answer = telamon("plan", *RUN, "--on", "v5e:2x2", "--estimate", "--only", "decode")
    assert answer.code == 0 and "decoding step" in answer.out and "MFU" not in answer.out


def test_the_figures_as_json(telamon):
    answer = telamon("plan", *RUN, "--on", "v5e:2x4", "--estimate", "--json", "--decode", "8x128")
    made = json.loads(answer.out)
    train, decode = made["programs"]
    assert made["fits"] and made["topology"] == "v5e:2x4"
    parts = ("weights", "optimizer", "gradients", "activations", "temporaries", "inputs", "code")
    assert train["total"] == sum(train["memory"][part] for part in parts)
    assert decode["what"] == "decoding step for 8 rows of 128 tokens"
    assert made["prediction"]["step_seconds"] > 0


def test_a_search_writes_a_run_that_training_takes(telamon, tmp_path):
    best = str(tmp_path / "best.yml")
    run = ("plan", *RUN, "--on", "v5e:2x2", "--search", best, "--estimate")
    answer = telamon(*run, "--free-batch", "--cost", "1.2")
    assert answer.code == 0, answer.err
    for word in ("mesh.", "a dollar", "dropped", "telamon train"):
        assert word in " ".join(answer.out.split()), word
    assert telamon("config", "show", best).code == 0
    made = json.loads(telamon(*run, "--json").out)
    first = made["candidates"][0]
    assert first["config"]["train"]["batch_size"] == 16
    assert first["tokens_per_second_per_device"] == max(found["tokens_per_second_per_device"] for found in made["candidates"])
    assert made["considered"] > sum(made["dropped"].values()) > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--on", "v6:4x4"), ("v6:4x4", "v6e")),
        (("--on", "v6e:4x4", "--estimate", "--import", "no_such_module"), ("no_such_module",)),
        (("--on", "v6e:4x4", "--cost", "0"), ("--cost 0", "dollars")),
        (("--on", "v6e:4x4", "--decode", "many"), ("many", "32x8192")),
        (("--on", "v5e:2x4", "--free-batch"), ("--free-batch", "--search")),
        (("--on", "here", "--search", "best.yml"), ("--search", "machine")),
        (("--on", "v5e:2x4", "--search", "best.yml", "--save", "step.bin"), ("--save", "telamon plan best.yml")),
        (("--on", "v5e:2x4", "--estimate", "--search", "best"), ("best", ".yml")),
        (("--on", "v5e:2x4", "--quick", "--save", "step.bin"), ("--quick", "--save", "code")),
        (("--on", "v5e:2x4", "--quick", "--estimate"), ("--quick", "--estimate")),
        (("--on", "v5e:2x4", "--estimate", "--save", "step.bin"), ("--save", "--estimate compiles nothing")),
        (("--on", "v5e:2x4", "--only", "decode", "--save", "step.bin"), ("--save", "--only decode")),
        (("--on", "v5e:2x4", "--save", "/"), ("--save /", "folder")),
        (("--on", "v5e:2x4", "--save", f"{__file__}/step.bin"), ("--save", "test_plan.py is no folder")),
        (("--on", "v5e:2x4", "--search", f"{__file__}/best.yml"), ("--search", "test_plan.py is no folder")),
        (("--on", "v5e:2x4", "--cost", "nan"), ("--cost nan", "dollars")),
        (("--on", "v5e:2x4", "--cost", "2", "--only", "decode"), ("--cost", "--only decode")),
        (("--on", "v5e:2x4", "--timeout", "-4"), ("--timeout -4",)),
        (("--on", "v5e:2x4", "--host-memory", "0"), ("--host-memory 0",)),
        (("--on", "h100:8", "--estimate", "train.attention=splash"), ("train.attention=splash", "auto, cudnn, tokamax, chunked")),
        (("--on", "h100:8", "--estimate", "train.loss=tokamax"), ("train.loss=tokamax", "auto, chunked")),
        (("--on", "2*v5e:2x2", "--estimate"), ("mesh.cross_slice", "2*v5e:2x2 has 2", "mesh.cross_slice.data=2")),
        (("--on", "here", "--estimate"), ("--estimate", "machine by name")),
        (("--on", "v5e:2x4", "--estimate", "train.batch_size=9"), ("train.batch_size=9", "8 devices")),
    ],
)
def test_what_cannot_be_planned_is_named(telamon, arguments, words):
    answer = telamon("plan", "tiny", *arguments)
    assert answer.code == 2
    for word in words:
        assert word in answer.err


@pytest.mark.parametrize(("machine", "package"), [("v5e:2x2", "pip install libtpu"), ("h100:8", "pip install jax-cuda13-plugin")])
def test_without_the_compiler_arithmetic_answers_and_says_what_to_install(telamon, monkeypatch, machine, package):
    monkeypatch.setattr(topology, "find_spec", lambda name: None)
    answer = telamon("plan", *RUN, "--on", machine)
    assert answer.code == 0, answer.err
    for word in ("An estimate by arithmetic", package, "not compiled", "no compiler was asked"):
        assert word in " ".join(answer.out.split()), word
    assert telamon("plan", "model.preset=llama3.1-70b", "train.batch_size=8", "--on", machine, "--only", "train").code == 2
    made = json.loads(telamon("plan", *RUN, "--on", machine, "--json").out)
    assert package in made["not_compiled"] and made["programs"][0]["compiled"] is None
    saving = telamon("plan", *RUN, "--on", machine, "--save", "step.bin")
    assert saving.code == 2 and "--save step.bin" in saving.err and package in saving.err


def test_the_words_of_a_layout_stay_whole_on_a_narrow_screen(telamon, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    run = ("plan", "tiny", "train.batch_size=64", "mesh.cross_slice.data=4", "--on", "h100:8x4")
    answer = telamon(*run, "--estimate", "--cost", "2", "--search", str(tmp_path / "best.yml"))
    assert answer.code == 0, answer.err
    assert "mesh.cross_slice.data=4" in answer.out and "…" not in answer.out
    assert max(len(line) for line in answer.out.splitlines() if line[0] in "┏│") <= 80


def test_a_search_without_the_compiler_says_what_to_install(telamon, monkeypatch, tmp_path):
    monkeypatch.setattr(topology, "find_spec", lambda name: None)
    answer = telamon("plan", *RUN, "--on", "v5e:2x2", "--search", str(tmp_path / "best.yml"))
    assert answer.code == 0, answer.err
    assert "An estimate by arithmetic" in answer.out and "libtpu" in answer.out


def test_a_plan_for_this_machine_keeps_the_step_that_training_then_takes(telamon, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quick = ("tiny", "train.steps=2", "watch.peak_tflops=1", "watch.tensorboard=false", "checkpoint.asynchronous=false")
    bounds = ("--timeout", "300", "--host-memory", "16", "--only", "train")
    planned = telamon("plan", *quick, "--on", "here", "--save", "step.bin", *bounds)
    assert planned.code == 0, planned.err
    assert "no prediction" in planned.out and "step.bin" in planned.out
    trained = telamon("train", *quick, "--compiled", "step.bin")
    assert trained.code == 0, trained.err
    assert "step.bin" in trained.out


def test_a_quick_plan_says_that_code_was_not_generated(telamon):
    if find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    answer = telamon("plan", *RUN, "--on", "v5e:2x2", "--quick", "--only", "train")
    assert answer.code == 0, answer.err
    for word in ("code was not generated", "of the compiled program", "all-gather"):
        assert word in " ".join(answer.out.split()), word


def test_a_compilation_that_takes_too_long_is_stopped(telamon):
    answer = telamon("plan", "tiny", "--on", "here", "--timeout", "0.2", "--only", "train")
    assert answer.code == 7
    assert "0.2" in answer.err
