"""A folder is whole or not there, whatever ends its making, and what was there before is only lost to something whole."""

import errno
import os
import signal
import subprocess
import sys

import pytest

from telamon.errors import CheckpointError, ConfigError
from telamon.hub import whole_folder as module
from telamon.hub.whole_folder import check_free, check_space, whole_folder


@pytest.fixture
def old(tmp_path):
    """An earlier folder of the same name."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("old")
    return tmp_path / "out"


def test_a_block_that_ends_well_leaves_the_folder_alone(tmp_path):
    with whole_folder(tmp_path / "deep" / "out") as folder:
        (folder / "a").write_text("1")
        assert not (tmp_path / "deep" / "out").exists()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]
    assert (tmp_path / "deep" / "out" / "a").read_text() == "1"


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit])
def test_a_block_that_is_interrupted_leaves_nothing(tmp_path, error):
    with pytest.raises(error), whole_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("1")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path):
    message = r"out could not be written: .*out/a: No space left on device. Nothing of it is left"
    with pytest.raises(CheckpointError, match=message), whole_folder(tmp_path / "out") as folder:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / "a"))
    assert list(tmp_path.iterdir()) == []


def test_a_kill_leaves_a_name_that_is_no_result_and_that_the_next_call_takes_away(tmp_path):
    code = f"""
import os, signal, pathlib
from telamon.hub.whole_folder import whole_folder
with whole_folder(pathlib.Path({str(tmp_path / "out")!r})) as folder:
    (folder / "a").write_text("1")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == [".out.part"]
    with whole_folder(tmp_path / "out") as folder:
        assert list(folder.iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_earlier_folder_stays_until_the_new_one_is_whole(old):
    with pytest.raises(ValueError), whole_folder(old) as folder:
        (folder / "config.json").write_text("new")
        raise ValueError
    assert (old / "config.json").read_text() == "old"
    with whole_folder(old) as folder:
        (folder / "config.json").write_text("new")
        assert (old / "config.json").read_text() == "old"
    assert (old / "config.json").read_text() == "new"
    assert [path.name for path in old.parent.iterdir()] == ["out"]


def test_an_earlier_folder_comes_back_where_the_last_rename_fails(old, monkeypatch):
    rename = type(old).rename

    def fail(path, target):
        if path.name.endswith(".part"):
            raise OSError(errno.EIO, "I/O error", str(path))
        return rename(path, target)

    monkeypatch.setattr(type(old), "rename", fail)
    with pytest.raises(CheckpointError, match="I/O error"), whole_folder(old):
        pass
    assert (old / "config.json").read_text() == "old"
    assert [path.name for path in old.parent.iterdir()] == ["out"]


def test_what_is_in_the_way_is_refused(old, tmp_path):
    with pytest.raises(ConfigError, match="out exists already; choose another name, or replace it with --overwrite"):
        check_free(old, overwrite=False, mark="config.json")
    assert check_free(old, overwrite=True, mark="config.json") == old
    with pytest.raises(ConfigError, match=r"has no config.yaml, so it was not made by this command and --overwrite does not touch it"):
        check_free(old, overwrite=True, mark="config.yaml")
    with pytest.raises(ConfigError, match="is a file"):
        check_free(old / "config.json", overwrite=True, mark="config.json")
    (tmp_path / "empty").mkdir()
    assert check_free(tmp_path / "empty", overwrite=False, mark="config.json") == tmp_path / "empty"


def test_an_empty_folder_is_taken(tmp_path):
    (tmp_path / "out").mkdir()
    with whole_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("1")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_disk_that_is_too_small_is_told_both_sizes(tmp_path, monkeypatch):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1_500_000}))
    check_space(tmp_path / "deep" / "out", 1_500_000)
    with pytest.raises(CheckpointError, match=r"out needs 2.0 MB of disk, and 1.5 MB are free there; free some space"):
        check_space(tmp_path / "deep" / "out", 2_000_000)


@pytest.mark.parametrize("there", [True, False])
def test_a_link_to_another_disk_stays_a_link(tmp_path, there):
    (tmp_path / "disk").mkdir()
    if there:
        (tmp_path / "disk" / "out").mkdir()
    (tmp_path / "out").symlink_to("disk/out")
    with whole_folder(check_free(tmp_path / "out", overwrite=False, mark="config.json")) as folder:
        (folder / "config.json").write_text("new")
    assert (tmp_path / "out").is_symlink()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["out"]
    assert (tmp_path / "out" / "config.json").read_text() == "new"
