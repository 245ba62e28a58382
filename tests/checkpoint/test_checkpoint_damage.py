"""A directory is not yet a checkpoint: what is damaged or unfinished is told from what is whole, named, and passed over."""

import logging
import shutil

import pytest
from checkpoint_states import abstract, assert_same, make_state

from telamon.checkpoint.store import CheckpointStore
from telamon.errors import CheckpointError


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A folder with checkpoints of steps 10 and 20."""
    folder = tmp_path_factory.mktemp("two")
    store = CheckpointStore(folder)
    for step in (10, 20):
        store.save(step, make_state(step), {"step": step})
    store.wait()
    return folder


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def alter(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def empty(path):
    path.write_bytes(b"")


def remove(path):
    path.unlink()


@pytest.mark.parametrize("harm", [cut, alter, empty, remove])
def test_whichever_file_of_the_newest_is_harmed_the_one_before_is_used(two, tmp_path, harm, caplog):
    names = files(two / "step_00000020")
    assert {"manifest.json", "commit_success.txt", "state/manifest.ocdbt"} <= set(names)
    for name in names:
        if harm is not remove and not (two / "step_00000020" / name).stat().st_size:
            continue  # an empty file can only go missing
        folder = tmp_path / name.replace("/", "_")
        shutil.copytree(two, folder)
        harm(folder / "step_00000020" / name)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            store = CheckpointStore(folder)
            assert store.latest_valid() == 10, name
        [message] = store.skipped
        assert "step_00000020" in message and name in message
        assert message in caplog.text
        assert_same(store.restore(10, abstract(make_state()))[0], make_state(10))
        with pytest.raises(CheckpointError, match=f"step_00000020 is damaged: .*{name}"):
            store.restore(20, abstract(make_state()))
        assert (folder / "step_00000020").exists(), "what others damaged is kept for them to look at"


def test_a_newest_without_its_commit_mark_is_passed_over(two, tmp_path):
    shutil.copytree(two, tmp_path / "run")
    (tmp_path / "run/step_00000020/manifest.json").unlink()
    store = CheckpointStore(tmp_path / "run")
    assert store.latest_valid() == 10
    assert store.skipped == [f"skipping the damaged checkpoint {tmp_path}/run/step_00000020: it lacks its commit mark, manifest.json"]


def test_an_empty_folder_of_that_name_is_no_checkpoint(two, tmp_path):
    shutil.copytree(two, tmp_path / "run")
    (tmp_path / "run/step_00000030").mkdir()
    assert CheckpointStore(tmp_path / "run").latest_valid() == 20


def test_with_none_whole_there_is_none(tmp_path):
    store = CheckpointStore(tmp_path)
    assert store.latest_valid() is None
    store.save(1, make_state(), {})
    store.wait()
    cut(tmp_path / "step_00000001/manifest.json")
    assert CheckpointStore(tmp_path).latest_valid() is None
    assert CheckpointStore(tmp_path / "nowhere", readonly=True).latest_valid() is None


def test_a_damaged_step_is_replaced_when_the_run_reaches_it_again(two, tmp_path):
    shutil.copytree(two, tmp_path / "run")
    alter(tmp_path / "run/step_00000020/state/manifest.ocdbt")
    store = CheckpointStore(tmp_path / "run")
    store.restore(10, abstract(make_state()))
    store.save(20, make_state(21), {"step": 21})
    store.wait()
    again = CheckpointStore(tmp_path / "run")
    assert again.latest_valid() == 20
    assert_same(again.restore(20, abstract(make_state()))[0], make_state(21))


def test_what_a_kill_left_is_removed_at_the_next_start_and_nothing_else(two, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(two, run)
    (run / "step_00000030.pending").write_text("")
    (run / "step_00000030.orbax-checkpoint-tmp/state").mkdir(parents=True)
    (run / "step_00000040.pending").write_text("")
    shutil.copytree(run / "step_00000020", run / "step_00000040")
    (run / "step_00000040/manifest.json").unlink()  # killed between Orbax's commit and ours
    (run / "step_00000020.pending").write_text("")  # killed between our commit and the end of the save
    (run / "step_00000050.orbax-checkpoint-tmp").mkdir()  # not announced: somebody else's
    (run / "notes.txt").write_text("mine")
    assert CheckpointStore(run).latest_valid() == 20
    assert sorted(path.name for path in run.iterdir()) == [
        "notes.txt",
        "step_00000010",
        "step_00000020",
        "step_00000050.orbax-checkpoint-tmp",
    ]
