"""Where metrics go: `metrics.jsonl` always, TensorBoard by default, Weights & Biases on request."""

import contextlib
import json
import math
import os
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, Protocol, Self

from telamon.config.schema import WatchConfig
from telamon.errors import ConfigError
from telamon.watch.files import is_url, join, read_text, write_text, writing

METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"

_NO_EVENTS = "choose another run.root, free some space, or set watch.tensorboard=false"


class Tracker(Protocol):
    """A place that takes metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics of one step (names and units: see `telamon.watch`)."""
        ...

    def close(self) -> None:
        """Write what is buffered and let go of files."""
        ...


class Trackers:
    """Fans metrics out to any number of trackers; itself a tracker and a context manager."""

    def __init__(self, trackers: Iterable[Tracker] = ()) -> None:
        self._trackers = list(trackers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics of one step everywhere."""
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def close(self) -> None:
        """Close every tracker, the rest even where one fails."""
        with contextlib.ExitStack() as stack:
            for tracker in self._trackers:
                stack.callback(tracker.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # What could not be written cannot be written while closing either; the first error is the one to show.
        with contextlib.suppress(*([] if kind is None else [OSError, ConfigError])):
            self.close()


class JsonlTracker:
    """One JSON object a line, on disk as soon as it is logged.

    A resumed run computes steps again that the interrupted one had logged after its last checkpoint; lines of
    steps from `first_step` on are cut, as is a line that a killed process left unfinished.
    """

    def __init__(self, path: str, *, first_step: int = 0) -> None:
        kept = [line for line in parse_lines(read_text(path) or "") if line["step"] < first_step]
        self._path = path
        self._url_lines: list[str] | None = None
        text = "".join(_dump(line) for line in kept)
        write_text(path, text)
        if is_url(path):
            self._url_lines = [text]
            self._written = time.monotonic()
        else:
            self._file: IO[str] = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line: the step, then the metrics in the order given."""
        line = _dump({"step": step, **metrics})
        if self._url_lines is None:
            with writing(self._path):
                self._file.write(line)
                self._file.flush()
            return
        # Object stores cannot append: the object is written anew, seldom enough not to be felt.
        self._url_lines.append(line)
        if time.monotonic() - self._written > 30:
            self._rewrite()

    def close(self) -> None:
        """Close the file."""
        if self._url_lines is None:
            self._file.close()
        else:
            self._rewrite()

    def _rewrite(self) -> None:
        assert self._url_lines is not None
        write_text(self._path, "".join(self._url_lines))
        self._written = time.monotonic()


def _dump(line: Mapping[str, Any]) -> str:
    # JSON has no NaN; null is what pandas and others read as one.
    plain = {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in line.items()}
    return json.dumps(plain, allow_nan=False, default=float) + "\n"


def parse_lines(text: str) -> list[dict[str, Any]]:
    """Lines of a `metrics.jsonl`; an unfinished last line (a killed process) is left out."""
    lines = []
    for raw in text.splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            lines.append(json.loads(raw))
    return lines


def read_metrics(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Every line of a run's `metrics.jsonl`, in order; empty where there is none."""
    return parse_lines(read_text(join(run_dir, METRICS)) or "")


class TensorBoardTracker:
    """TensorBoard scalars, written with the `tensorboard` package alone.

    Its own EventFileWriter imports TensorFlow wherever that is installed (seconds, and a GPU's memory), so
    records are framed by its RecordWriter into a file opened here.
    """

    def __init__(self, folder: str, *, first_step: int = 0) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        events: Any = event_pb2  # its names are made at import time, which a type checker cannot see
        summaries: Any = summary_pb2
        self._event, self._summary = events.Event, summaries.Summary
        self._path = join(folder, f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}")
        self._records = RecordWriter(_open_binary(self._path))
        self._write(file_version="brain.Event:2")
        # A START tells TensorBoard to drop what earlier files hold from this step on.
        start = events.SessionLog(status=events.SessionLog.START)
        self._write(step=first_step, session_log=start)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one event that holds every metric as a scalar."""
        values = [self._summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        self._write(step=step, summary=self._summary(value=values))

    def close(self) -> None:
        """Close the event file."""
        self._records.close()

    def _write(self, **fields: Any) -> None:
        with writing(self._path, _NO_EVENTS):
            self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())
            self._records.flush()


def _open_binary(path: str) -> IO[bytes]:
    if is_url(path):
        import fsspec

        return fsspec.open(path, "wb").open()  # pyright: ignore[reportAttributeAccessIssue]
    with writing(path, _NO_EVENTS):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return open(path, "xb")


class WandbTracker:
    """Weights & Biases; a resumed run continues under the same id."""

    def __init__(self, project: str, *, name: str, config: Mapping[str, Any], folder: str) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"watch.wandb_project={project!r} needs the wandb package: pip install 'telamon[wandb]', or unset watch.wandb_project"
            ) from error
        os.makedirs(folder, exist_ok=True)
        self._run = wandb.init(project=project, name=name, id=name, resume="allow", config=dict(config), dir=folder)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of one step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the W&B run."""
        self._run.finish()


def open_trackers(
    watch: WatchConfig, run_dir: str | os.PathLike[str], *, config: Mapping[str, Any], first_step: int = 0, process_index: int = 0
) -> Trackers:
    """The trackers a config asks for; on processes other than 0 an empty set, so that only one writes.

    Args:
        watch: where metrics go.
        run_dir: the run's directory or URL.
        config: the resolved config as plain values, shown by W&B.
        first_step: number under which this process logs its first step; what earlier processes of the same run
            logged from there on is replaced.
        process_index: this process among the run's.
    """
    if process_index != 0:
        return Trackers()
    with contextlib.ExitStack() as on_error:

        def opened(tracker: Tracker) -> Tracker:
            on_error.callback(tracker.close)
            return tracker

        trackers = [opened(JsonlTracker(join(run_dir, METRICS), first_step=first_step))]
        if watch.tensorboard:
            trackers.append(opened(TensorBoardTracker(join(run_dir, TENSORBOARD), first_step=first_step)))
        if watch.wandb_project:
            name = os.path.basename(os.fspath(run_dir).rstrip("/"))
            folder = os.path.join(".cache", "wandb") if is_url(run_dir) else os.fspath(run_dir)
            trackers.append(opened(WandbTracker(watch.wandb_project, name=name, config=config, folder=folder)))
        on_error.pop_all()
    return Trackers(trackers)
