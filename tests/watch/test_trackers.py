"""Metrics reach every tracker, once per step, also over a kill and a resume."""

import json
import subprocess
import sys

import pytest

from telamon.config.schema import WatchConfig
from telamon.errors import ConfigError
from telamon.watch.trackers import JsonlTracker, Trackers, open_trackers, read_metrics

CONFIG = {"train": {"steps": 4}}


def log_steps(run_dir, steps, first_step=0, **watch):
    with open_trackers(WatchConfig(**watch), run_dir, config=CONFIG, first_step=first_step) as trackers:
        for step in steps:
            trackers.log(step, {"loss": 5.0 - step, "grad_norm": 1.0})


def test_jsonl_holds_one_object_a_line(tmp_path):
    log_steps(tmp_path, range(3), tensorboard=False)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": s, "loss": 5.0 - s, "grad_norm": 1.0} for s in range(3)]


def test_a_line_is_on_disk_before_the_tracker_is_closed(tmp_path):
    tracker = JsonlTracker(str(tmp_path / "metrics.jsonl"))
    tracker.log(1, {"loss": 2.0})
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.0}]
    tracker.close()


def test_a_resumed_run_holds_each_step_once_in_order(tmp_path):
    log_steps(tmp_path, range(6), tensorboard=False)
    log_steps(tmp_path, range(4, 8), first_step=4, tensorboard=False)
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(8))


def test_a_line_that_a_killed_process_left_unfinished_is_cut(tmp_path):
    log_steps(tmp_path, range(3), tensorboard=False)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 3, "lo')
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1, 2]
    log_steps(tmp_path, [3], first_step=3, tensorboard=False)
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1, 2, 3]


def test_a_value_that_is_not_finite_leaves_valid_json(tmp_path):
    tracker = JsonlTracker(str(tmp_path / "metrics.jsonl"))
    tracker.log(0, {"loss": float("nan")})
    tracker.close()
    assert read_metrics(tmp_path) == [{"step": 0, "loss": None}]


def test_metrics_at_a_url_are_written_and_resumed():
    import fsspec

    log_steps("memory://runs/one", range(4), tensorboard=False)
    log_steps("memory://runs/one", range(2, 5), first_step=2, tensorboard=False)
    assert [line["step"] for line in read_metrics("memory://runs/one")] == list(range(5))
    fsspec.filesystem("memory").rm("/runs", recursive=True)


def test_only_process_0_writes(tmp_path):
    with open_trackers(WatchConfig(), tmp_path / "run", config=CONFIG, process_index=1) as trackers:
        trackers.log(0, {"loss": 1.0})
    assert not (tmp_path / "run").exists()


def test_a_run_directory_whose_parent_is_a_file_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/run/metrics\.jsonl"):
        open_trackers(WatchConfig(), tmp_path / "file" / "run", config=CONFIG)


def test_tensorboard_reads_the_events_and_drops_steps_a_resume_replaced(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_steps(tmp_path, range(6))
    log_steps(tmp_path, range(4, 8), first_step=4)
    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    scalars = reader.Scalars("loss")
    assert [s.step for s in scalars] == list(range(8))
    assert [s.value for s in scalars] == [5.0 - s for s in range(8)]


def test_tensorboard_is_written_without_tensorflow(tmp_path):
    """With a `tensorflow` that can be imported, and with warnings as errors: neither is met."""
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('tensorflow was imported')")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from telamon.watch.trackers import TensorBoardTracker\n"
        "t = TensorBoardTracker(sys.argv[1] + '/tb'); t.log(0, {'loss': 1.0}); t.close()\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code, str(tmp_path)], check=True)
    assert len(list((tmp_path / "tb").iterdir())) == 1


def test_without_wandb_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"telamon\[wandb\]"):
        log_steps(tmp_path, [0], wandb_project="p")


def test_wandb_gets_the_config_and_continues_a_run_under_its_name(tmp_path, monkeypatch):
    calls = []

    class Run:
        def log(self, metrics, step):
            calls.append((step, metrics))

        def finish(self):
            calls.append("finish")

    class Wandb:
        @staticmethod
        def init(**arguments):
            calls.append(arguments)
            return Run()

    monkeypatch.setitem(sys.modules, "wandb", Wandb)
    log_steps(tmp_path / "night", [3], wandb_project="p", tensorboard=False)
    arguments, logged, end = calls
    assert arguments["project"] == "p" and arguments["id"] == "night" and arguments["config"] == CONFIG
    assert logged == (3, {"loss": 2.0, "grad_norm": 1.0}) and end == "finish"


def test_one_tracker_that_fails_to_close_does_not_keep_the_others_open():
    closed = []

    class Failing:
        def log(self, step, metrics):
            pass

        def close(self):
            closed.append("failing")
            raise OSError("disk full")

    class Fine(Failing):
        def close(self):
            closed.append("fine")

    with pytest.raises(OSError, match="disk full"):
        Trackers([Failing(), Fine(), Failing()]).close()
    assert sorted(closed) == ["failing", "failing", "fine"]
