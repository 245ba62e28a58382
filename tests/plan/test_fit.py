"""The smallest machine on which a preset trains, with a compiler whose word is set by the test."""

from types import SimpleNamespace
from typing import Any

import pytest

from telamon.errors import ConfigError
from telamon.plan import fit
from telamon.records import checks
from telamon.records.checks import CHECKS, make_subject
from telamon.records.record import run_check

GIB = 2**30


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Machines that the compiler was asked about; it takes the second and what comes after."""
    machines: list[str] = []

    def compiled(config: Any, topology: Any, program: str, **how: Any) -> Any:
        machines.append(topology.text)
        fits = len(machines) > 1
        return SimpleNamespace(fits=fits, refusal=None if fits else "too much", peak_bytes=10 * GIB)

    monkeypatch.setattr(fit, "compile_program", compiled)
    return machines


def test_the_first_machine_that_the_compiler_takes_is_the_one(asked: list[str]):
    """Machines that are hopeless by arithmetic are not compiled for: 8 G parameters take 128 GB for themselves."""
    found = fit.smallest_fit("llama3.1-8b", "tpu")
    assert asked == ["v6e:4x4", "v6e:8x8"]
    assert found.topology.text == "v6e:8x8" and "train.batch_size=64" in found.settings
    assert found.share == pytest.approx(10 / 31.24, rel=1e-6)


def test_a_model_for_no_machine_is_refused_with_what_was_tried(asked: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fit, "MACHINES", {"gpu": ("h100:1",)})
    with pytest.raises(ConfigError, match=r"llama3\.1-8b fits on none of h100:1; by arithmetic"):
        fit.smallest_fit("llama3.1-8b", "gpu")
    with pytest.raises(ConfigError, match=r"qwen3-0\.6b fits on none of h100:1; h100:1: too much"):
        fit.smallest_fit("qwen3-0.6b", "gpu")


def test_a_models_positions_bound_the_row(asked: list[str]):
    assert "train.seq_len=2048" in fit.smallest_fit("gpt3-52k", "gpu").settings


def test_devices_that_do_not_divide_the_width_of_a_mixture_split_its_experts(asked: list[str], monkeypatch: pytest.MonkeyPatch):
    """GPT-OSS is 2880 wide, which is 64 times 45."""
    monkeypatch.setattr(fit, "MACHINES", {"tpu": ("v6e:16x16", "v5p:4x8x8")})
    found = fit.smallest_fit("gpt-oss-120b", "tpu")
    assert asked == ["v6e:16x16", "v5p:4x8x8"]
    assert found.settings[-2:] == ("mesh.fsdp=64", "mesh.expert=4")


def test_a_record_names_the_machine_and_what_was_set(asked: list[str], monkeypatch: pytest.MonkeyPatch):
    assert checks.CHECKS["fits-on-tpu"].by_name
    record = run_check(CHECKS["fits-on-tpu"], make_subject("llama3.1-8b", tiny=False))
    assert record.hardware.startswith("v6e:8x8: 64 x TPU v6e, ahead of time; train.seq_len=4096 train.batch_size=64")
    assert record.passed and record.figure == pytest.approx(10 / 31.24, rel=1e-6)
