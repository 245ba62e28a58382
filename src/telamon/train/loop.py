"""The training loop: a plain `for`. Batch in, compiled step, metrics read one step late.

Order of starting: (1) join the other processes; (2) mesh, model and optimizer from the config, which may still be refused;
(3) the run's directory; (4) in parallel, programs are compiled and data opened; (5) state: restored from the run's newest
whole checkpoint when a run is resumed, else from the run that train.init_from names, else fresh from the seed; (6) steps.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import jax
import numpy as np
import psutil
from rich.console import Console

from telamon.checkpoint.store import CheckpointStore
from telamon.config.load import fingerprint
from telamon.config.schema import RunConfig
from telamon.data.loader import Batch as HostBatch
from telamon.data.loader import Loader
from telamon.errors import ConfigError, DataError, OutOfDataError, Stopped
from telamon.parallel.host_memory import keep_freed_memory
from telamon.parallel.peers import lost_peers
from telamon.parallel.start import keep_programs, start_processes
from telamon.train.evaluation import acceptance_metrics, evaluate
from telamon.train.job import Job, Programs, make_job
from telamon.train.placement import place
from telamon.train.recorder import History, Recorder
from telamon.train.run_dir import RunDirectory, create_run, forget_run, open_run, save_config
from telamon.train.schedule import learning_rate_schedule
from telamon.train.start import announce, open_data, starting_state
from telamon.train.state import TrainState, weights_hash
from telamon.train.stop import StopRequest
from telamon.watch import phases
from telamon.watch.environment import describe_environment, write_environment
from telamon.watch.log import banner, human_seconds, line, make_console
from telamon.watch.profile import ProfileWindow, write_hlo
from telamon.watch.progress import RunDisplay
from telamon.watch.report import write_report
from telamon.watch.summary import Summary, summarised_steps, write_summary
from telamon.watch.throughput import Throughput, find_peak
from telamon.watch.trackers import open_trackers


@dataclass(frozen=True)
class Finished:
    """What a hook at the end of a run may use."""

    job: Job
    run: RunDirectory
    state: TrainState
    loader: Loader
    print: Callable[[str], None]
    """Prints a line, on the first process only."""


Hook = Callable[[Finished], None]


@lost_peers()
def train(
    config: RunConfig,
    *,
    resume: str | None = None,
    allow_mismatch: bool = False,
    compiled: Callable[[Job], Programs] | None = None,
    at_end: Sequence[Hook] = (),
) -> Summary:
    """Run a training job to its end.

    Args:
        config: the run.
        resume: directory of the run to continue from its newest whole checkpoint.
        allow_mismatch: go on with weights that were trained with another tokenizer or chat template.
        compiled: gives the steps of a job that were compiled before; none: they are compiled now.
        at_end: called in order, on every process, when training is done and saved, before the report is written.

    Raises:
        ConfigError, DataError, NumericsError, CheckpointError, PeerError: see `telamon.errors`.
        Stopped: SIGTERM came; the run is saved and can be resumed.
    """
    began = psutil.Process().create_time()
    keep_freed_memory()
    start_processes()
    keep_programs(config.run.compile_cache)
    primary = jax.process_index() == 0
    console = make_console(quiet=not primary)
    job = make_job(config)
    if compiled is not None:
        job = replace(job, ready=compiled(job))
    run = open_run(resume) if resume else create_run(config)
    with StopRequest() as stop, run.store(config) as store:
        if primary:
            write_environment(run.path, describe_environment())
        first = store.latest_valid() or 0
        announce(console, job, run, resumed=resume is not None, first=first, skipped=store.skipped)
        peak, peak_line = find_peak(jax.local_devices()[0], override_tflops=config.watch.peak_tflops)
        line(console, f"  {peak_line}")
        job.compile_ahead(first_step=first, evaluate=config.data.val_fraction > 0)
        try:
            loader = open_data(config, run, console, allow_mismatch=allow_mismatch)
        except (ConfigError, DataError):
            if not resume:
                forget_run(run)
            raise
        gzip = loader.gzip_bits_per_byte()
        state, history = starting_state(job, store, loader, first=first)
        if resume:
            save_config(run, config)
        banner(console, "train")
        line(
            console,
            f"  weights {weights_hash(state.weights, job.mesh)}, data {loader.data_hash[:16]}, config {fingerprint(config)} (hashes)",
        )
        if job.ready is None:
            line(console, f"  picked {'; '.join(job.picks(config.train.batch_size_at(first)))}")
        if config.profile.hlo and primary:
            line(console, f"  {write_hlo(job.train_step(config.train.batch_size_at(first)), run.path)}")
        trackers = open_trackers(
            config.watch, run.path, config=config.model_dump(mode="json"), first_step=first + 1, process_index=jax.process_index()
        )
        display = RunDisplay(
            config.train.steps, first_step=first, gzip_bits_per_byte=gzip, bar=config.watch.progress, console=console, quiet=not primary
        )
        with trackers, display:
            recorder = Recorder(
                steps=config.train.steps,
                first=first,
                log_every=config.train.log_every,
                places=lambda step: config.train.batch_size_at(step) * config.train.seq_len,
                learning_rate=learning_rate_schedule(config),
                display=display,
                trackers=trackers,
                meter=Throughput(flops_per_token=job.flops_per_token, peak=peak, devices=job.mesh.size),
                gzip_bits_per_byte=gzip,
                history=history,
                began=began,
            )
            loop = Loop(job, loader, store, recorder, run, stop)
            try:
                state, done = loop.steps(state, first=first)
            except KeyboardInterrupt:
                line(console, f"interrupted; go on from the newest checkpoint with: telamon train resume={run.path}")
                raise
        finished = Finished(job, run, state, loader, lambda text: line(console, text))
        return _finish(finished, recorder, done=done, at_end=at_end, console=console)


@dataclass(frozen=True)
class Loop:
    """The steps of a run, and what happens between them."""

    job: Job
    loader: Loader
    store: CheckpointStore
    recorder: Recorder
    run: RunDirectory
    stop: StopRequest

    def steps(self, state: TrainState, *, first: int) -> tuple[TrainState, int]:
        """Train from step `first` on; returns the state and the steps done, which are all unless the run was stopped."""
        job, train, recorder = self.job, self.job.config.train, self.recorder
        last = train.last_step
        window = ProfileWindow(job.config.profile, self.run.path)
        batches = self.loader.batches(first, last)
        done = first
        try:
            for step in range(first, last):
                with recorder.meter.waiting():
                    batch = next(batches)
                window.before_step(step, state)
                _trace_batch(step, batch)
                compiled = job.train_step(train.batch_size_at(step))
                on_devices = place(batch, token_bytes=self.loader.tokenizer.token_bytes, mesh=job.mesh)
                state, metrics = compiled(state, on_devices)
                done = step + 1
                recorder.after_step(done, metrics)
                stopping = self.stop.requested(done)
                self._between(state, done, ending=stopping or done == last)
                if stopping:
                    break
        except OutOfDataError:
            if done > first:
                recorder.settle()
                self._save(state, done)
            raise
        finally:
            window.close()
        recorder.settle()
        self.store.wait()
        return state, done

    def _between(self, state: TrainState, done: int, *, ending: bool) -> None:
        """Evaluate and save where it is due. A state is saved only after its step's loss was seen to be finite."""
        config, recorder = self.job.config, self.recorder
        every = config.checkpoint.every
        last = config.train.last_step
        evaluate_now = done == last or (config.eval.every is not None and done % config.eval.every == 0)
        if not (ending or evaluate_now or (every is not None and done % every == 0)):
            return
        recorder.settle()
        with recorder.meter.paused():
            if evaluate_now and not (ending and done != last):
                recorder.validated(done, evaluate(self.job, state.weights, self.loader))
        if ending or (every is not None and done % every == 0):
            self._save(state, done)

    def _save(self, state: TrainState, done: int) -> None:
        with jax.set_mesh(self.job.mesh):
            self.store.save(done, state, self._meta(done))

    def _meta(self, done: int) -> dict:
        history = asdict(History(self.recorder.elapsed, self.recorder.history.seconds_to_beat_gzip))
        return {"position": self.loader.position(done), "config": fingerprint(self.job.config), "history": history}


def _trace_batch(step: int, batch: HostBatch) -> None:
    """Leave the batch's checksum in the trace of phases, where one is kept: proof of the order of data."""
    if phases.enabled():
        phases.mark(f"batch {step} {zlib.crc32(np.ascontiguousarray(batch['tokens']).tobytes()):08x}")


def _finish(finished: Finished, recorder: Recorder, *, done: int, at_end: Sequence[Hook], console: Console) -> Summary:
    """Summary, hooks, report; raises Stopped where the run was asked to stop before its end."""
    config = finished.job.config
    last = config.train.last_step
    stopped = done < last
    if not stopped:
        if config.sample.tokens:
            banner(console, "samples")
        for hook in at_end:
            hook(finished)
    speed, validation = recorder.meter.overall(), recorder.validation
    summary = Summary(
        steps=done,
        final_loss=recorder.latest.get("loss"),
        val_bits_per_byte=validation.bits_per_byte if validation else None,
        gzip_bits_per_byte=recorder.gzip_bits_per_byte,
        seconds_to_beat_gzip=recorder.history.seconds_to_beat_gzip,
        wall_seconds=recorder.elapsed,
        tokens_per_second=speed.tokens_per_second if speed else None,
        mfu=speed.mfu if speed else None,
        extra={
            "val_loss": validation.loss if validation else None,
            **(acceptance_metrics(validation) if validation else {}),
            "parameters": finished.job.model.parameter_count,
            "data_wait": speed.data_wait if speed else None,
            "step_seconds": speed.step_seconds if speed else None,
            "steps_without_trained_tokens": recorder.untrained_steps,
        },
    )
    if jax.process_index() == 0:
        # A finished run that is resumed trains nothing, and has nothing to say in place of the figures of its training.
        if done > recorder.first or summarised_steps(finished.run.path) != done:
            write_summary(finished.run.path, summary)
        report = write_report(finished.run.path)
        banner(console, "done" if not stopped else "stopped")
        _print_summary(console, summary)
        line(console, f"  {finished.run.path}: report {report}")
    if stopped:
        raise Stopped(f"stopped after step {done} of {last} and saved; continue with: telamon train resume={finished.run.path}")
    return summary


def _print_summary(console: Console, summary: Summary) -> None:
    parts = [f"{summary.steps} steps in {human_seconds(summary.wall_seconds)}"]
    if summary.val_bits_per_byte is not None and summary.gzip_bits_per_byte is not None:
        parts.append(f"validation {summary.val_bits_per_byte:.3f} bits/byte, gzip -9 {summary.gzip_bits_per_byte:.3f}")
    if summary.seconds_to_beat_gzip is not None:
        parts.append(f"gzip beaten after {human_seconds(summary.seconds_to_beat_gzip)}")
    line(console, "  " + "; ".join(parts))
