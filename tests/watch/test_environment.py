"""The record of what a run ran on."""

import json
import subprocess

import jax
import pytest

from telamon.watch.environment import describe_environment, git_state, write_environment


def test_it_names_versions_devices_machine_and_flags(tmp_path, monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_example=1")
    monkeypatch.setenv("SECRET_TOKEN", "not to be written")
    environment = describe_environment()
    write_environment(tmp_path, environment)
    text = (tmp_path / "environment.json").read_text()
    read = json.loads(text)
    assert read == environment
    assert read["packages"]["jax"] == jax.__version__
    assert read["devices"]["platform"] == "cpu" and read["devices"]["count"] == len(jax.devices())
    assert read["memory_bytes"] > 10**8 and read["cpu"]["cores"] >= 1 and read["cpu"]["model"]
    assert read["variables"]["LIBTPU_INIT_ARGS"] == "--xla_example=1"
    assert "not to be written" not in text


@pytest.fixture
def checkout(tmp_path):
    def git(*arguments):
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=n", "-c", "user.email=e@x", *arguments], check=True, capture_output=True)

    git("init")
    (tmp_path / "code.py").write_text("a = 1\n")
    git("add", "code.py")
    git("commit", "-m", "first")
    return tmp_path


def test_git_state_tells_a_changed_checkout_from_a_clean_one(checkout):
    clean = git_state(str(checkout / "code.py"))
    assert clean is not None and len(clean["sha"]) == 40 and clean["dirty"] is False
    (checkout / "code.py").write_text("a = 2\n")
    changed = git_state(str(checkout / "code.py"))
    assert changed == {"sha": clean["sha"], "dirty": True}


def test_a_package_installed_below_someone_elses_checkout_has_no_git_state(checkout):
    (checkout / "installed.py").write_text("")
    assert git_state(str(checkout / "installed.py")) is None
