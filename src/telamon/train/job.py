"""What a run trains and with which programs, made from its config before any data are read."""

import functools
import threading
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import optax
from jax.sharding import Mesh
from pydantic import ValidationError

from telamon.config.checks import check_devices
from telamon.config.schema import ExpertsConfig, ModelConfig, RunConfig
from telamon.errors import ConfigError
from telamon.kernels import cross_entropy_pick, picks
from telamon.kernels import experts as experts_kernels
from telamon.kernels.attention import pick as attention_pick
from telamon.layers.parts import HowExperts
from telamon.models.decoder import Numerics
from telamon.models.spec import ModelSpec
from telamon.models.weights import Model, flatten, sharded_shapes
from telamon.parallel.mesh import build_mesh
from telamon.parallel.rules import check_sharded
from telamon.parallel.target import platform_name
from telamon.train.flags import check_flags, compile_with, xla_flags
from telamon.train.loss import Loss, language_model_loss
from telamon.train.optimizer import build_optimizer
from telamon.train.placement import abstract_batch
from telamon.train.state import HOST, TrainState, abstract_state, fresh_state, shardings_of
from telamon.train.step import bind_step, eval_step, train_step
from telamon.watch import phases
from telamon.watch.throughput import AttentionCost, flops_per_token


@dataclass(frozen=True)
class Programs:
    """Train steps that were compiled before."""

    source: str
    """Where they are from."""
    steps: Mapping[int, Any]
    """Rows of a batch -> the compiled step."""


type Kind = Literal["init", "train", "eval"]
"""Which of a run's programs."""


@dataclass(frozen=True)
class Job:
    """A model on a mesh with its optimizer and loss, and its programs, each compiled once, in the background."""

    config: RunConfig
    mesh: Mesh
    model: Model
    optimizer: optax.GradientTransformation
    loss: Loss
    ready: Programs | None = None
    """Train steps that need no compilation; none: they are compiled."""
    _programs: dict[tuple[str, int], Future[Any]] = field(default_factory=dict)
    _picks: dict[int, Future[tuple[str, ...]]] = field(default_factory=dict)
    # Two at a time: most of a compilation runs on one core, and a third would take it from the data's preparation.
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, "compile"))
    _lock: Any = field(default_factory=threading.Lock)

    @functools.cached_property
    def abstract_state(self) -> TrainState:
        """Shapes, types and shardings of the training state."""
        return abstract_state(self.model, self.optimizer, self.mesh, offload=self.config.optimizer.offload)

    def fresh_state(self) -> TrainState:
        """The state before the first step, each array made where it lives: no device ever holds more than its share."""
        return self._program("init", 0).result()()

    def train_step(self, rows: int) -> Any:
        """The compiled step `(state, batch) -> (state, metrics)` for a batch of `rows`; the state is donated."""
        return self.ready.steps[rows] if self.ready else self._program("train", rows).result()

    def picks(self, rows: int) -> tuple[str, ...]:
        """Which of its paths each operation of the step for `rows` takes, and why none before it; waits until the step is traced."""
        program = self._program("train", rows)
        picked = self._picks[rows]
        wait((picked, program), return_when=FIRST_COMPLETED)
        if not picked.done():
            program.result()  # tracing failed, and this says how
        return picked.result()

    def eval_step(self, rows: int) -> Any:
        """The compiled evaluation `(weights, batch) -> Measured`."""
        return self._program("eval", rows).result()

    def compile_ahead(self, *, first_step: int, evaluate: bool) -> None:
        """Start to compile what the run needs, in the order it needs it, and return at once."""
        if self.ready is None:
            self._program("train", self.config.train.batch_size_at(first_step))
        if first_step == 0:
            self._program("init", 0)
        if evaluate:
            self._program("eval", self.eval_rows)

    @property
    def eval_rows(self) -> int:
        """Rows of an evaluation batch."""
        return self.config.eval.batch_size or self.config.train.batch_size

    @property
    def flops_per_token(self) -> float:
        """Model FLOPs a token of this run's rows (see `model_flops`)."""
        return model_flops(self.model, seq_len=self.config.train.seq_len)

    @property
    def flags(self) -> dict[str, Any]:
        """XLA's options for this run's programs, by name."""
        return xla_flags(self.config, self.mesh.devices.flat[0])

    def compiled(self, lowered: Any) -> Any:
        """A lowered program of this run, compiled with the run's options."""
        return compile_with(lowered, self.flags, given=self.config.train.xla_flags)

    def _program(self, kind: Kind, rows: int) -> Future[Any]:
        with self._lock:
            if (kind, rows) not in self._programs:
                if kind == "train":
                    self._picks[rows] = Future()
                self._programs[kind, rows] = self._pool.submit(self._compile, kind, rows)
            return self._programs[kind, rows]

    def _compile(self, kind: Kind, rows: int) -> Any:
        phases.mark("compile begin")
        with jax.set_mesh(self.mesh):
            with picks.noted() as made:
                lowered = self.lowered(kind, rows)
            if kind == "train":
                self._picks[rows].set_result(tuple(map(str, made)))
            compiled = self.compiled(lowered)
        phases.mark("compile end")
        return compiled

    def lowered(self, kind: Kind, rows: int) -> Any:
        """A program of the run, traced; needs the mesh in force, that of devices or, of those that only a compiler knows, the abstract one."""
        if kind == "init":
            init = bind_step(fresh_state, model=self.model, optimizer=self.optimizer, seed=self.config.train.seed)
            return jax.jit(init, out_shardings=shardings_of(self.abstract_state)).lower()
        batch = abstract_batch(rows=rows, seq_len=self.config.train.seq_len, mesh=self.mesh)
        fixed = {"model": self.model, "loss": self.loss}
        if kind == "eval":
            return jax.jit(bind_step(eval_step, **fixed)).lower(self.abstract_state.weights, batch)
        how = {"accumulate": self.config.train.accumulate, "bias_rate": self.config.train.experts.bias_rate}
        step = bind_step(train_step, optimizer=self.optimizer, **how, **fixed)
        where = (shardings_of(self.abstract_state), None)
        return jax.jit(step, donate_argnums=0, out_shardings=where).lower(self.abstract_state, batch)


def make_job(config: RunConfig, *, devices: list[Any] | None = None) -> Job:
    """Everything a run needs but data and values; allocates nothing on devices.

    Args:
        config: the run.
        devices: default all, over all processes.

    Raises:
        ConfigError: the config does not fit the devices.
    """
    check_devices(config, len(devices or jax.devices()))
    mesh = build_mesh(config.mesh, devices=devices)
    model = Model(_spec(config.model), numerics(config))
    # One of this process's devices: another's can neither be compiled for nor asked. Of devices that are not there, any.
    device = next((device for device in mesh.devices.flat if device.process_index == jax.process_index()), mesh.devices.flat[0])
    _check_experts(config, model)
    check_paths(config, platform_name(device.platform))
    check_flags(config, device)
    _check_host_memory(config, device)
    check_sharded(mesh, shapes=sharded_shapes(model, mesh), limit=config.mesh.replicated_limit)
    return Job(config, mesh, model, build_optimizer(config, model), language_model_loss(config.train))


def _spec(config: ModelConfig) -> ModelSpec:
    """The architecture. A family of a user's own may be built of parts that refuse its sizes."""
    try:
        return config.spec()
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(f"model.family={config.family} is built of a {error.title} that cannot be: {reason}") from error


def numerics(config: RunConfig) -> Numerics:
    """How a run's model is run in training."""
    how, experts = config.train, config.train.experts
    run = HowExperts(experts.path, experts.capacity_factor, experts.jitter, by_document=experts.balance == "sequence")
    return Numerics(dtype=how.compute_dtype, remat=how.remat, attention=how.attention, experts=run)


def check_paths(config: RunConfig, platform: str) -> None:
    """Raise ConfigError where the run names a path of attention, of the loss or of experts that a platform does not have."""
    how = config.train
    picks.check_name("attention", picks.on_platform(attention_pick.PLATFORMS, platform), wanted=how.attention, platform=platform)
    picks.check_name("loss", picks.on_platform(cross_entropy_pick.PLATFORMS, platform), wanted=how.loss, platform=platform)
    grouped = picks.on_platform(experts_kernels.PLATFORMS, platform)
    picks.check_name("experts", (*grouped, "capacity", "dense"), wanted=how.experts.path, platform=platform)


def _check_experts(config: RunConfig, model: Model) -> None:
    """Raise ConfigError where a setting of experts has nothing to act on."""
    default = ExpertsConfig()
    changed = {name: value for name, value in config.train.experts if value != getattr(default, name)}
    if changed and not any(block.ffn.has_experts for block in (*model.spec.blocks, *model.spec.mtp)):
        name, value = next(iter(changed.items()))
        raise ConfigError(
            f"train.experts.{name}={value} has no effect: a model of the family {config.model.family} has no experts; leave it out"
        )
    if "bias_rate" in changed and not any(info.role == "buffer" for info in flatten(model.info).values()):
        rate = changed["bias_rate"]
        raise ConfigError(
            f"train.experts.bias_rate={rate} has no effect: routers of the family {config.model.family} have no selection bias; "
            "leave it out, or even the load out with train.experts.balance"
        )


def _check_host_memory(config: RunConfig, device: Any) -> None:
    """Raise ConfigError where something is to wait in the host's memory, and devices like `device` cannot reach it."""
    asked = {"optimizer.offload=true": config.optimizer.offload, "train.remat=offload": config.train.remat == "offload"}
    kinds = {memory.kind for memory in device.addressable_memories()}
    if kinds and HOST not in kinds and any(asked.values()):  # a GPU that only a compiler knows does not say
        setting = next(setting for setting, wanted in asked.items() if wanted)
        raise ConfigError(
            f"{setting} needs devices that read the host's memory ({HOST}); {device.device_kind} has {', '.join(sorted(kinds))}; "
            "leave it out"
        )


def model_flops(model: Model, *, seq_len: int) -> float:
    """Model FLOPs a token, forward and backward, in rows of `seq_len`, by the one rule (see `telamon.watch.throughput`)."""
    mixers = [block.mixer for block in (*model.spec.blocks, *model.spec.mtp) if block.mixer.attention_width]
    layers = [AttentionCost(mixer.attention_width, window=mixer.attention_window, chunk=mixer.attention_chunk) for mixer in mixers]
    return flops_per_token(model.matmul_parameters, seq_len=seq_len, attention=layers)
