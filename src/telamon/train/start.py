"""The start of a run: what is said, data opened, state made or restored."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console

from telamon.checkpoint.store import CheckpointStore
from telamon.config.load import load_run
from telamon.config.schema import RunConfig
from telamon.data.chat_template import configured_template
from telamon.data.loader import ArithmeticLoader, Loader, open_loader
from telamon.data.tokenizer import TextTokenizer
from telamon.errors import CheckpointError, ConfigError
from telamon.infer.run import CHECKPOINTS, CONFIG, GENERATION, HF_RECORD, TOKENIZER
from telamon.infer.text_record import TextRecord
from telamon.models.mtp import FURTHER
from telamon.models.weights import Model, WeightInfo, Weights
from telamon.parallel.rules import weight_sharding
from telamon.train.flags import describe_flags
from telamon.train.job import Job
from telamon.train.recorder import History
from telamon.train.run_dir import RunDirectory
from telamon.train.schedule import describe_schedule
from telamon.train.state import TrainState
from telamon.watch.files import is_url, join, read_text, write_text
from telamon.watch.log import banner, facts, human_bytes, line


def announce(console: Console, job: Job, run: RunDirectory, *, resumed: bool, first: int, skipped: Sequence[str]) -> None:
    """Say what is about to run."""
    banner(console, f"run {run.path}")
    for message in skipped:
        line(console, f"  warning: {message}")
    if resumed and first >= job.config.train.last_step:
        line(console, f"  resumed after step {first}, its last: nothing is left to train; train.steps or train.stop_at can be set higher")
    elif resumed:
        line(console, f"  resumed after step {first}" if first else "  resumed, but no checkpoint was saved: starting from step 0")
    facts(console, describe_job(job) | ({"weights": f"those of this run after step {first}"} if first else {}))


def _parameters(model: Model) -> str:
    active = f" ({model.active_parameters:,} active)" if model.active_parameters < model.parameter_count else ""
    return f"{model.parameter_count:,} parameters{active}"


def describe_job(job: Job) -> dict[str, str]:
    """What a job is, in a few lines."""
    config, train = job.config, job.config.train
    axes = " x ".join(f"{axis} {size}" for axis, size in job.mesh.shape.items() if size > 1) or "1 device"
    ready = {} if job.ready is None else {"train step": f"compiled before, from {job.ready.source}"}
    return {
        "model": f"{config.model.preset or config.model.family}, {_parameters(job.model)}, {config.model.n_layers} layers",
        "devices": f"{job.mesh.size} x {job.mesh.devices.flat[0].device_kind}: {axes}",
        "batch": f"{train.batch_size} rows of {train.seq_len} tokens, {train.accumulate} microbatch{'es' if train.accumulate > 1 else ''}",
        "attention": "documents in one row cannot see each other",
        "weights": f"those of {_begun(job, train.init_from)}" if train.init_from else f"fresh, from seed {train.seed}",
        "schedule": describe_schedule(config),
        "XLA options": describe_flags(config, job.mesh.devices.flat[0]),
        **ready,
    }


def _begun(job: Job, run: str) -> str:
    """The run that weights are from, and what is left of them."""
    left = len(load_run(join(run, CONFIG)).config.model.spec().mtp) - len(job.model.spec.mtp)
    return f"{run}, without {left} of its layers for multi-token prediction" if left > 0 else run


def open_data(config: RunConfig, run: RunDirectory, console: Console, *, allow_mismatch: bool = False) -> ArithmeticLoader:
    """Open the data, and save what they are in the run.

    Raises ConfigError where the weights to go on with know another tokenizer or chat template, unless `allow_mismatch`.
    """
    if not allow_mismatch:
        _refuse_new_tokenizer(config)
    loader = open_loader(config, process_index=jax.process_index(), process_count=jax.process_count())
    template = configured_template(config.data.tokenizer)
    text = TextRecord.of(loader.tokenizer, template)
    if not allow_mismatch:
        _check_text(text, run, config.train.init_from)
    report = loader.report()
    for source in report["sources"]:
        held_out = source["held_out_documents"]
        line(
            console,
            f"  data: {source['name']}, {source['files']:,} files, {human_bytes(source['bytes'])}, sha256 {source['sha256'][:16]}, "
            f"{source['tokens']:,} tokens, {held_out:,} document{'' if held_out == 1 else 's'} held out, "
            f"rows {source['epoch']['fill']:.1%} filled, {source['epoch']['dropped']:,} tokens dropped",
        )
    if jax.process_index() == 0:
        write_text(run.file("data.json"), json.dumps(report, indent=2) + "\n")
        if isinstance(loader.tokenizer, TextTokenizer) and not is_url(run.path):
            loader.tokenizer.export(Path(run.file(TOKENIZER)))
            if template is not None:
                template.export(Path(run.file(TOKENIZER)))
            _carry_generation(config.data.tokenizer.path, Path(run.file(TOKENIZER)))
        text.write(run.path)
    return loader


def _carry_generation(tokenizer: str | None, folder: Path) -> None:
    """What an imported model's files say of generation, such as several tokens that end a turn, stays true of what is trained from it."""
    if tokenizer is not None:
        given = Path(tokenizer)
        beside = (given if given.is_dir() else given.parent) / GENERATION
        if beside.is_file() and beside.parent.resolve() != folder.resolve():
            shutil.copyfile(beside, folder / GENERATION)


def _refuse_new_tokenizer(config: RunConfig) -> None:
    """An imported model without a tokenizer knows ids all the same; those of a tokenizer trained now mean nothing to it."""
    run = config.train.init_from
    text = any(source.kind != "synthetic" for source in config.data.sources)
    if run is None or config.data.tokenizer.path is not None or not text:
        return
    if TextRecord.read(run) is None and read_text(join(run, HF_RECORD)) is not None:
        raise ConfigError(
            f"train.init_from={run} was imported without a tokenizer, and its weights do not know the ids of one that is trained now; name the "
            "model's own in data.tokenizer.path, or go on all the same with --allow-mismatch"
        )


def _check_text(now: TextRecord, run: RunDirectory, init_from: str | None) -> None:
    """Whether the weights know this text: those of the run itself, or of a new one those that it begins with."""
    for origin in (run.path, init_from):
        before = None if origin is None else TextRecord.read(origin)
        if origin is not None and before is not None:
            before.check(now, run=origin, way_out="set data.tokenizer back, or go on all the same with --allow-mismatch")
            return


def starting_state(job: Job, store: CheckpointStore, loader: Loader, *, first: int) -> tuple[TrainState, History]:
    """The state after step `first`, and what the run remembers of itself."""
    if first == 0:
        return begin(job, job.fresh_state()), History()
    with jax.set_mesh(job.mesh):
        state, meta = store.restore(first, job.abstract_state)
    loader.restore(meta["position"])
    return state, History(**meta["history"])


def begin(job: Job, fresh: TrainState) -> TrainState:
    """The state before the first step: `fresh`, or with the weights of the run that `train.init_from` names."""
    run = job.config.train.init_from
    if run is None:
        return fresh
    jax.tree.map(lambda leaf: leaf.delete(), fresh.weights)  # two sets of weights may not fit
    store = CheckpointStore(join(run, CHECKPOINTS), readonly=True)
    step = store.latest_valid()
    if step is None:
        raise CheckpointError(f"train.init_from={run}: there is no whole checkpoint to begin with")
    with jax.set_mesh(job.mesh):
        weights = _with_spare_rows(job, _restore_weights(job, store, step))
    return replace(fresh, weights=weights)


def _restore_weights(job: Job, store: CheckpointStore, step: int) -> Weights:
    """A checkpoint's weights, its tables with as many rows as they have there: `model.vocab_multiple` may be another now."""
    saved, abstract = store.contents(step).arrays, dict(job.abstract_state.weights)
    for name, info in _tables(job).items():
        dim, stored = info.axes.index("vocab"), saved.get(f"weights.{name}")
        if stored is not None and len(stored.shape) == len(info.shape) and stored.shape[dim] >= job.model.spec.vocab_size:
            shape = (*info.shape[:dim], stored.shape[dim], *info.shape[dim + 1 :])
            abstract[name] = jax.ShapeDtypeStruct(shape, abstract[name].dtype, sharding=weight_sharding(job.mesh, info.axes, shape))
    return store.restore_subtree(step, "weights", abstract, spare=FURTHER)


def _with_spare_rows(job: Job, weights: Weights) -> Weights:
    """The weights with the job's number of spare rows, zero where they are new."""

    def resized(table: jax.Array, info: WeightInfo) -> jax.Array:
        dim, real = info.axes.index("vocab"), job.model.spec.vocab_size
        spare = [(0, info.shape[dim] - real if place == dim else 0) for place in range(table.ndim)]
        return jnp.pad(jax.lax.slice_in_dim(table, 0, real, axis=dim), spare)

    shardings = job.model.shardings(job.mesh)
    changed = {name: info for name, info in _tables(job).items() if weights[name].shape != info.shape}
    return weights | {
        name: jax.jit(partial(resized, info=info), out_shardings=shardings[name])(weights[name]) for name, info in changed.items()
    }


def _tables(job: Job) -> dict[str, WeightInfo]:
    """The weights with a row or column for each token."""
    return {name: info for name, info in job.model.info.items() if isinstance(info, WeightInfo) and "vocab" in info.axes}
