import os

import pytest

from telamon.cli import platforms


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine with libtpu installed and nothing on its buses."""
    monkeypatch.setenv("JAX_PLATFORMS", "")  # restored afterwards
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setattr(platforms.sys, "platform", "linux")
    monkeypatch.setattr(platforms, "find_spec", lambda name: name == "libtpu")
    monkeypatch.setattr(platforms, "_DEVICES", (str(tmp_path / "nvidia*"),))
    monkeypatch.setattr(platforms, "_makers", lambda: {"0x8086"})
    return tmp_path


def test_jax_is_kept_to_the_cpu_where_only_a_compiler_is_there(bare):
    platforms.spare_absent_accelerators()
    assert os.environ["JAX_PLATFORMS"] == "cpu"


@pytest.mark.parametrize("sign", ["device file", "on the bus", "no compiler", "another system", "the user's word"])
def test_any_other_machine_is_left_alone(bare, monkeypatch, sign):
    if sign == "device file":
        (bare / "nvidia0").touch()
    elif sign == "on the bus":
        monkeypatch.setattr(platforms, "_makers", lambda: {"0x8086", "0x1ae0"})
    elif sign == "no compiler":
        monkeypatch.setattr(platforms, "find_spec", lambda name: None)
    elif sign == "another system":
        monkeypatch.setattr(platforms.sys, "platform", "darwin")
    else:
        monkeypatch.setenv("JAX_PLATFORMS", "proxy")
    before = os.environ.get("JAX_PLATFORMS")
    platforms.spare_absent_accelerators()
    assert os.environ.get("JAX_PLATFORMS") == before
