"""The profiler window and the HLO dump."""

import jax
import jax.numpy as jnp
import pytest

from telamon.config.schema import ProfileConfig
from telamon.errors import ConfigError
from telamon.watch.profile import ProfileWindow, write_hlo


@pytest.fixture
def calls(monkeypatch):
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: calls.append(("start", folder)))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    return calls


def steps_traced(calls, window, first, last, tmp_path):
    profile = ProfileWindow(ProfileConfig(steps=window), tmp_path)
    traced = []
    for step in range(first, last):
        profile.before_step(step)
        if len(calls) % 2:
            traced.append(step)
    profile.close()
    return traced


@pytest.mark.parametrize(
    ("first", "last", "expected"), [(0, 20, [10, 11, 12]), (11, 20, [11, 12]), (0, 12, [10, 11]), (13, 20, []), (0, 5, [])]
)
def test_the_window_holds_its_steps_also_when_a_run_starts_or_ends_inside(calls, tmp_path, first, last, expected):
    assert steps_traced(calls, "10:13", first, last, tmp_path) == expected
    assert calls == ([("start", str(tmp_path / "profile")), "stop"] if expected else [])


def test_without_a_window_nothing_is_traced(calls, tmp_path):
    assert steps_traced(calls, None, 0, 5, tmp_path) == []


def test_an_empty_window_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"profile\.steps=5:5"):
        ProfileWindow(ProfileConfig(steps="5:5"), tmp_path)


def test_a_real_trace_is_written(tmp_path):
    profile = ProfileWindow(ProfileConfig(steps="1:2"), tmp_path)
    value = jnp.ones(4)
    for step in range(3):
        profile.before_step(step, value)
        value = value * 2
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


def test_the_compiled_program_is_written_as_text(tmp_path):
    compiled = jax.jit(lambda x: x @ x).lower(jnp.ones((4, 4))).compile()
    with open(write_hlo(compiled, tmp_path)) as file:
        assert file.read().startswith("HloModule")
