"""Checks: functions of a model that give one figure, each with a name, a unit and a threshold.

A new check is a function under `@check`; from then on `telamon verify` runs it and the support table has a column for it.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from telamon.checkpoint.store import CheckpointStore
from telamon.config.load import load_run
from telamon.config.schema import RunConfig
from telamon.models.decoder import Numerics
from telamon.models.mixture import MixtureSizes
from telamon.models.weights import Model
from telamon.plan.fit import smallest_fit
from telamon.train.job import Job, make_job
from telamon.train.placement import place
from telamon.train.state import TrainState


@dataclass(frozen=True)
class Subject:
    """What is checked: a preset, whole or shrunk."""

    preset: str
    config: RunConfig
    """A short run of the model: float32, a few rows, no data."""
    tiny: bool
    """Whether the model's sizes were shrunk (same family and blocks)."""


@dataclass(frozen=True)
class Elsewhere:
    """A figure that holds for a machine other than this one."""

    figure: float
    hardware: str
    """The machine, and what was set for it."""


@dataclass(frozen=True)
class Check:
    """A figure and the most it may be."""

    name: str
    title: str
    """A few words for the support table."""
    unit: str
    threshold: float
    """Largest figure that passes."""
    measure: Callable[[Subject], float | Elsewhere] = field(repr=False)
    whole_only: bool = False
    """Makes no sense for a shrunk model, and allocates nothing for a whole one."""
    by_name: bool = False
    """Is run only where it is asked for: it takes a minute, or needs a compiler that is no part of the installation."""


CHECKS: dict[str, Check] = {}


def check(
    *, title: str, unit: str, threshold: float, whole_only: bool = False, by_name: bool = False
) -> Callable[[Callable[[Subject], float | Elsewhere]], Check]:
    """Decorator: makes a check of a function and lists it under the function's name, with hyphens."""

    def register(function: Callable[[Subject], float | Elsewhere]) -> Check:
        name = function.__name__.replace("_", "-")
        CHECKS[name] = Check(name, title, unit, threshold, function, whole_only, by_name)
        return CHECKS[name]

    return register


@check(title="parameter count", unit="share of the published count", threshold=0.005, whole_only=True)
def parameter_count(subject: Subject) -> float:
    """Difference between the tree's leaf sizes and the published number of parameters, which is of the model that generates.

    Of a mixture the larger one of two: of all its parameters, and of those that work on a token.
    """
    model = subject.config.model
    total = _difference(Model(model.spec().main).parameter_count, model.published_parameters)
    return max(total, _active_difference(model)) if isinstance(model, MixtureSizes) else total


def _active_difference(model: MixtureSizes) -> float:
    return _difference(Model(model.spec().main).active_parameters, model.published_active_parameters)


def _difference(count: int, published: int | None) -> float:
    assert published is not None, "a preset states its published numbers of parameters (a test sees to it)"
    return abs(count - published) / published


@check(title="train step", unit="loss after 8 steps on one batch / loss before", threshold=0.9)
def train_step(subject: Subject) -> float:
    """The step learns: eight steps on one batch of random tokens lower its loss."""
    job = make_job(subject.config)
    losses = _train(job, job.fresh_state(), range(8), same_batch=True)[1]
    assert np.isfinite(losses).all(), f"losses {losses}"
    return losses[-1] / losses[0]


@check(title="resume", unit="bytes of the state that differ", threshold=0.0)
def resume(subject: Subject) -> float:
    """Four steps, against two, a checkpoint, and two more from it: state and losses, bit for bit."""
    job = make_job(subject.config)
    whole, _ = _train(job, job.fresh_state(), range(4))
    half, _ = _train(job, job.fresh_state(), range(2))
    with tempfile.TemporaryDirectory() as folder, jax.set_mesh(job.mesh):
        with CheckpointStore(Path(folder) / "checkpoints") as store:
            store.save(2, half, {})
        restored, _ = CheckpointStore(Path(folder) / "checkpoints").restore(2, job.abstract_state)
    resumed, _ = _train(job, restored, range(2, 4))
    return float(sum(_differing_bytes(a, b) for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True)))


@check(title="decode equals forward", unit="largest difference of logits, float32", threshold=1e-4)
def decode_equals_forward(subject: Subject) -> float:
    """A prefill of half the tokens and single steps through the cache, against one forward of all."""
    model = Model(subject.config.model.spec(), Numerics())
    weights = jax.jit(model.init)(jax.random.key(0))
    B, T = 2, 16
    tokens = jax.random.randint(jax.random.key(1), (B, T), 0, model.spec.vocab_size)
    positions, segments = jnp.tile(jnp.arange(T), (B, 1)), jnp.ones((B, T), jnp.int32)

    @jax.jit
    def forward(weights: Any, tokens: jax.Array) -> jax.Array:
        decoder = model.bind(weights)
        return decoder.logits(decoder(tokens, positions=positions, segments=segments).hidden)

    @jax.jit
    def extend(weights: Any, cache: Any, tokens: jax.Array, positions: jax.Array) -> tuple[Any, jax.Array]:
        decoder = model.bind(weights)
        output = decoder(tokens, positions=positions, segments=jnp.ones_like(tokens), cache=cache)
        return output.cache, decoder.logits(output.hidden)

    cache, pieces = model.bind(weights).init_cache(batch=B, length=T), []
    for start, stop in [(0, T // 2), *((i, i + 1) for i in range(T // 2, T))]:
        cache, logits = extend(weights, cache, tokens[:, start:stop], positions[:, start:stop])
        pieces.append(logits)
    return float(jnp.max(jnp.abs(jnp.concatenate(pieces, axis=1) - forward(weights, tokens))))


@check(title="fits on TPU", unit="peak memory of the compiled step / what a device has", threshold=1.0, whole_only=True, by_name=True)
def fits_on_tpu(subject: Subject) -> Elsewhere:
    """The training step, compiled for the smallest slice on which it fits."""
    return _fit(subject, "tpu")


@check(title="fits on GPU", unit="peak memory of the compiled step / what a device has", threshold=1.0, whole_only=True, by_name=True)
def fits_on_gpu(subject: Subject) -> Elsewhere:
    """The same for GPUs."""
    return _fit(subject, "gpu")


def _fit(subject: Subject, platform: Literal["tpu", "gpu"]) -> Elsewhere:
    fit = smallest_fit(subject.preset, platform)
    topology = fit.topology
    return Elsewhere(fit.share, f"{topology.text}: {topology.chip_count} x {topology.chip.name}, ahead of time; {' '.join(fit.settings)}")


def _train(job: Job, state: TrainState, steps: range, *, same_batch: bool = False) -> tuple[TrainState, list[float]]:
    train, losses = job.config.train, []
    step = job.train_step(train.batch_size)
    with jax.set_mesh(job.mesh):
        for number in steps:
            rng = np.random.default_rng(0 if same_batch else number)
            tokens = rng.integers(0, job.model.spec.vocab_size, (train.batch_size, train.seq_len + 1)).astype(np.int32)
            places = np.broadcast_to(np.arange(train.seq_len, dtype=np.int32), tokens[:, 1:].shape)
            ones = np.ones_like(places)
            batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": ones, "segments": ones, "positions": places}
            token_bytes = np.ones(job.model.spec.vocab_size, np.int32)
            state, metrics = step(state, place(batch, token_bytes=token_bytes, mesh=job.mesh))
            losses.append(float(metrics["loss"]))
    return state, losses


def _differing_bytes(left: jax.Array, right: jax.Array) -> int:
    a, b = (np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x) for x in (left, right))
    return int(np.sum(np.frombuffer(a.tobytes(), np.uint8) != np.frombuffer(b.tobytes(), np.uint8)))


def make_subject(preset: str, *, tiny: bool) -> Subject:
    """A preset made ready for checks.

    Raises:
        ConfigError: there is no such preset.
    """
    short = (
        "optimizer.learning_rate=0.01",
        "train.batch_size=8",
        "train.seq_len=32",
        "train.steps=8",
        "train.compute_dtype=float32",
        "optimizer.schedule.kind=constant",
    )
    config = load_run(overrides=[f"model.preset={preset}", *short]).config
    if tiny:
        config = config.model_copy(update={"model": config.model.shrunk()})
    return Subject(preset, config, tiny)


def applicable(subject: Subject) -> list[Check]:
    """The checks that can be run on a subject."""
    return [c for c in CHECKS.values() if not (c.whole_only and subject.tiny)]
