"""Old checkpoints go, the newest and the milestones stay, and none goes before a newer one is whole."""

from checkpoint_states import make_state
from hypothesis import given
from hypothesis import strategies as st

from telamon.checkpoint import manifest
from telamon.checkpoint.retention import expired
from telamon.checkpoint.store import CheckpointStore


def test_the_newest_and_the_multiples_stay():
    assert expired([10, 20, 30, 40, 50, 60], keep=2, keep_every=30) == [10, 20, 40]
    assert expired([10, 20, 30], keep=3, keep_every=None) == []
    assert expired([], keep=1, keep_every=None) == []


@given(st.sets(st.integers(0, 200)), st.integers(1, 5), st.none() | st.integers(1, 50))
def test_what_goes_is_older_than_what_is_kept_and_no_milestone(steps, keep, keep_every):
    gone = expired(steps, keep=keep, keep_every=keep_every)
    assert all(len([s for s in steps if s > step]) >= keep for step in gone)
    assert not [step for step in gone if keep_every and step % keep_every == 0]
    kept = steps - set(gone)
    assert all(keep_every and step % keep_every == 0 for step in sorted(kept)[:-keep])


def test_a_store_prunes_as_it_saves(tmp_path):
    store = CheckpointStore(tmp_path, keep=2, keep_every=4)
    for step in range(1, 8):
        store.save(step, make_state(step), {})
    store.wait()
    assert store.steps() == [4, 6, 7]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000004", "step_00000006", "step_00000007"]


def test_nothing_goes_until_the_newer_one_is_committed(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, make_state(1), {})
    store.wait()
    there = []
    scan = manifest.scan
    monkeypatch.setattr(manifest, "scan", lambda folder: there.append((tmp_path / "step_00000001/manifest.json").exists()) or scan(folder))
    store.save(2, make_state(2), {})
    store.wait()
    assert there == [True] and store.steps() == [2]


def test_a_damaged_checkpoint_does_not_push_out_a_whole_one(tmp_path):
    first = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2):
        first.save(step, make_state(step), {})
    first.wait()
    (tmp_path / "step_00000002/state/_METADATA").write_text("{")
    second = CheckpointStore(tmp_path, keep=2)
    assert second.latest_valid() == 1
    second.save(3, make_state(3), {})
    second.wait()
    assert [step for step in second.steps() if manifest.damage(second.path(step)) is None] == [1, 3]
