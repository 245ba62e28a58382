"""Bytes a device needs for a training step or for decoding, by arithmetic on abstract shapes: no compiler, no arrays.

What is stored (weights, moments, batch) is exact. What a step makes is a peak over its phases, in the order in which they run:

1. the loss: all saved activations, and what a chunk of logits and the head's gradient need;
2. each depth of multi-token prediction, and each stack of layers, last to first: activations still needed, gradients made so far, and a
   block's working set;
3. the embedding: all gradients, and the table's gradient before the devices share it out;
4. the update: all gradients, once more where they are clipped, and what comes from the host's memory.

With microbatches the sum of their gradients stands beside the first three. A block's and the loss's own needs are read from
their jaxprs (see `plan.working_set`), and what a mixture's experts take on a mesh from theirs (see `plan.mixtures`). Of TPUs and
GPUs that are known, three things are taken to hold: attention is a kernel that keeps no scores in memory, unless
`train.attention=chunked` says otherwise; all layers' weights are there in the type of activations too, for the compiler casts them
once, before its loop over layers; and on TPUs the loss takes the head in blocks. What allocators lose is not counted.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from telamon.config.checks import BATCH_AXES, check_devices
from telamon.config.hardware import Chip
from telamon.config.schema import AXES, ModelConfig, OptimizerConfig, RunConfig, TrainConfig
from telamon.models.mtp import FURTHER
from telamon.models.spec import ModelSpec, StackSpec
from telamon.models.weights import Model, WeightInfo, flatten
from telamon.parallel.local import BLOCK_BYTES
from telamon.parallel.rules import weight_sharding
from telamon.plan.blocks import loss_working, pattern_cost
from telamon.plan.mixtures import at_work
from telamon.plan.topology import Topology
from telamon.plan.working_set import most
from telamon.train.job import numerics
from telamon.train.optimizer import build_optimizer
from telamon.train.placement import LEAVES
from telamon.train.state import fresh_state

PARTS = ("weights", "optimizer", "gradients", "activations", "temporaries", "inputs", "code")
"""The parts of `Memory`."""

_LOOKED_UP = ("embedding", "positions")
_SHORT = 8
"""Positions of a traced row where scores of attention take no memory: what else a block keeps grows with the tokens alone."""


@dataclass(frozen=True)
class Memory:
    """Bytes a device, by what they hold."""

    weights: int = 0
    """Float32 master weights; for decoding, weights in the type of activations."""
    optimizer: int = 0
    """Moments; 0 where they wait in the host's memory."""
    gradients: int = 0
    """Float32, laid out like the weights; with microbatches those of one, and their sum."""
    activations: int = 0
    """What the forward pass saves for the backward pass; for decoding, the cache."""
    temporaries: int = 0
    """What else is live at the peak: a block's or the loss's working set, with gathered weights."""
    inputs: int = 0
    """The batch, the step's number, counts and the random key."""
    code: int = 0
    """The program; 0 where none was compiled."""
    host: int = 0
    """What waits in the host's memory, for each device; no part of the total."""
    advice: Mapping[str, str] = field(default_factory=dict, compare=False)
    """For each part, the option that would lower it."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.arguments + self.gradients + self.activations + self.temporaries + self.code

    @property
    def arguments(self) -> int:
        """What is there before the step begins."""
        return self.weights + self.optimizer + self.inputs


def estimate_memory(config: RunConfig, devices: Topology | int, *, at_least: bool = False) -> Memory:
    """What a training step of a run needs on each device.

    Args:
        config: the run; of a batch ramp the largest batch counts.
        devices: the machine, or a number of devices of a kind that is not known.
        at_least: leave out what experts of a mixture take while they work, which is found by tracing them: seconds instead of milliseconds.

    Raises:
        ConfigError: the run does not fit the number of devices.
    """
    layout = _Layout.of(config, devices)
    how, arrays = config.train, _arrays_of(config)
    steps = _Step(config, layout, arrays, at_least=at_least)
    inputs = layout.rows * how.accumulate * how.seq_len * sum(dtype().itemsize for dtype in LEAVES.values()) + arrays.scalars
    gradients = steps.gradients * (2 if how.accumulate > 1 else 1)
    phases = steps.phases()
    worst = max(phases, key=lambda name: phases[name])
    return Memory(
        weights=steps.gradients,
        optimizer=0 if config.optimizer.offload else steps.moments,
        gradients=gradients,
        activations=steps.saved,
        temporaries=max(0, phases[worst] - gradients - steps.saved),
        inputs=inputs,
        host=steps.host + (steps.moments if config.optimizer.offload else 0),
        advice=_advice(config, layout, worst),
    )


def estimate_decode_memory(config: RunConfig, devices: Topology | int, *, batch: int, length: int) -> Memory:
    """What generating text needs on each device: weights in the type of activations, and keys and values of all layers.

    Args:
        config: the run whose model it is; its mesh lays out both.
        devices: the machine, or a number of devices.
        batch: rows that are generated at a time, over all devices.
        length: tokens a row holds at most, the prompt's included.

    Raises:
        ConfigError: the mesh does not fit the number of devices.
    """
    layout = _Layout.of(config, devices, rows=batch)
    arrays, spec, item = _arrays_of(config), layout.work.spec, layout.itemsize
    cached = sum(
        stack.repeats * prod(shape) * item
        for stack in layout.work.spec.stacks
        for block in stack.pattern
        for shape in block.mixer.cache_shapes(batch=layout.rows, length=length).values()
    )
    generating = [info for path, info in arrays.weights.items() if not path.startswith(f"{FURTHER}.")]
    held = sum(layout.held(_Array(info, info.shape, item if info.narrowed else 4)) for info in generating)
    logits = layout.rows * spec.vocab_rows // layout.totals["tensor"] * 4
    advice = {
        "weights": _larger_axes(config, layout),
        "activations": "fewer rows or tokens (--decode)",
    }
    return Memory(weights=held, activations=cached, temporaries=2 * logits, inputs=layout.rows * length * 8, advice=advice)


def split_compiled(compiled: Any, estimate: Memory, *, decoding: bool = False) -> Memory:
    """A compiled step's own figures, split into parts.

    Arguments are weights, optimizer and inputs, of which the first two are known exactly; inputs take the rest, with what the
    compiler pads. Of temporaries the gradients and saved activations are the estimate's, and the rest is what remains. A
    decoding step is given its cache, so that this is a part of the arguments.

    Args:
        compiled: its `argument_bytes`, `temp_bytes`, `output_bytes`, `alias_bytes` and `code_bytes` a device.
        estimate: of the same run on the same devices.
        decoding: it is a decoding step.
    """
    fresh = compiled.temp_bytes + max(0, compiled.output_bytes - compiled.alias_bytes)
    gradients = min(fresh, estimate.gradients)
    given = max(0, compiled.argument_bytes - estimate.weights - estimate.optimizer)
    activations = min(given if decoding else fresh - gradients, estimate.activations)
    kept = 0 if decoding else activations
    return Memory(
        weights=estimate.weights,
        optimizer=estimate.optimizer,
        gradients=gradients,
        activations=activations,
        temporaries=fresh - gradients - kept,
        inputs=given - (activations - kept),
        code=compiled.code_bytes,
        host=estimate.host,
        advice=estimate.advice,
    )


@dataclass(frozen=True)
class _Array:
    """An array of the training state."""

    like: WeightInfo | None
    """The weight that it is laid out like; none: it is whole on every device."""
    shape: tuple[int, ...]
    itemsize: int


@dataclass(frozen=True)
class _Arrays:
    """The training state's arrays, whatever the devices."""

    weights: dict[str, WeightInfo]
    moments: tuple[_Array, ...]
    scalars: int
    """Bytes of what belongs to no weight: the step's number and the optimizer's counts, and the random key."""


def _arrays_of(config: RunConfig) -> _Arrays:
    model: Any = config.model
    optimizer: Any = config.optimizer
    return _arrays(model, optimizer)


@functools.lru_cache(maxsize=32)
def _arrays(model_config: ModelConfig, optimizer_config: OptimizerConfig) -> _Arrays:
    model = Model(model_config.spec())
    # Nothing else of a run has a say in what is stored.
    optimizer = build_optimizer(RunConfig.model_construct(model=model_config, optimizer=optimizer_config), model)
    state = jax.eval_shape(lambda: fresh_state(model, optimizer, 0))

    def array(leaf: Any, info: WeightInfo | None = None) -> Any:
        return leaf if isinstance(leaf, optax.MaskedNode) else _Array(info, leaf.shape, _itemsize(leaf))

    def masked(node: Any) -> bool:
        return isinstance(node, optax.MaskedNode)

    moments = optax.tree_utils.tree_map_params(optimizer, array, state.optimizer, model.info, transform_non_params=array, is_leaf=masked)
    found = [array(state.step), array(state.key), *jax.tree.leaves(moments, is_leaf=lambda node: isinstance(node, _Array))]
    scalars = sum(prod(leaf.shape) * leaf.itemsize for leaf in found if leaf.like is None)
    return _Arrays(flatten(model.info), tuple(leaf for leaf in found if leaf.like is not None), scalars)


def _itemsize(leaf: Any) -> int:
    # A random key says the size of one of its words; it has two.
    return 8 if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf.dtype.itemsize


@dataclass(frozen=True)
class _Layout:
    """How a step lies on devices."""

    totals: Mapping[str, int]
    """Size of each mesh axis over all slices."""
    mesh: AbstractMesh
    """The same as a mesh, by which weights are cut: over all slices too."""
    rows: int
    """Rows a device has of a microbatch."""
    work: "_Work"
    """What a device works on: of heads and features that a mesh axis splits, its share."""
    itemsize: int
    """Bytes of an activation."""
    chip: Chip | None
    """The devices, where they are known."""
    whole_work: "_Work"
    """The architecture with all sizes whole."""

    @property
    def kernels(self) -> bool:
        """Whether the devices are known TPUs or GPUs, with a kernel for attention and a compiler that fuses more."""
        return self.chip is not None

    @property
    def platform(self) -> str | None:
        """`tpu` or `gpu` where the devices are known."""
        return None if self.chip is None else self.chip.platform

    @classmethod
    def of(cls, config: RunConfig, devices: Topology | int, *, rows: int | None = None) -> "_Layout":
        within = check_devices(config, devices if isinstance(devices, int) else devices.device_count).sizes()
        across = config.mesh.cross_slice.sizes()
        totals = {axis: within[axis] * across[axis] for axis in AXES}
        how = config.train
        batch = max(how.batch_size, *(stage.batch_size for stage in how.batch_ramp)) if how.batch_ramp else how.batch_size
        share = (batch // how.accumulate if rows is None else rows) / prod([totals[axis] for axis in BATCH_AXES])
        itemsize = 2 if how.compute_dtype == "bfloat16" else 4
        model: Any = config.model
        sizes = tuple(totals.values())
        chip = None if isinstance(devices, int) else devices.chip
        whole = _work(model, (1,) * len(AXES))
        return cls(totals, _mesh(sizes), max(1, round(share)), _work(model, sizes), itemsize, chip, whole)

    def experts(self, stack: StackSpec, how: TrainConfig) -> int:
        """What the experts of a stack's layer hold while they work (see `plan.mixtures`)."""
        chip = self.chip
        kind = chip and AbstractDevice(chip.kinds[0], chip.cores_per_chip // chip.devices_per_chip, chip.platform)
        mesh = AbstractMesh(tuple(self.totals[axis] for axis in AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES), abstract_device=kind)
        sizes = {"d_model": self.work.spec.d_model, "rows": self.rows, "seq_len": how.seq_len, "dtype": how.compute_dtype}
        return at_work(stack.pattern, **sizes, path=how.experts.path, mesh=mesh)

    def held(self, array: _Array) -> int:
        """Bytes of an array of the state on a device."""
        shape = array.shape if array.like is None else _shard(self.mesh, array.like.axes, array.shape)
        return prod(shape) * array.itemsize

    def whole(self, info: WeightInfo) -> int:
        """Bytes of a float32 weight on a device that has gathered its parts over `fsdp`."""
        return prod(_shard(_mesh(tuple(1 if axis == "fsdp" else size for axis, size in self.totals.items())), info.axes, info.shape)) * 4


@dataclass(frozen=True)
class _Work:
    """An architecture, with its stacks, which take a while to find."""

    spec: ModelSpec
    stacks: tuple[StackSpec, ...]
    """The model's own, and one for each depth of multi-token prediction."""

    @property
    def names(self) -> list[str]:
        """Beginnings of the paths of each stack's weights."""
        own = len(self.stacks) - len(self.spec.mtp)
        return [f"stacks.{number}." for number in range(own)] + [f"{FURTHER}.{depth}." for depth in range(len(self.spec.mtp))]


@functools.lru_cache(maxsize=256)
def _work(model: ModelConfig, sizes: tuple[int, ...]) -> _Work:
    """The architecture with the share of each size that a device of a mesh of these sizes has; of layers it has all, and so of routers."""
    parts = dict(zip(AXES, sizes, strict=True)) | {"stage": 1, "expert": 1}
    divided = {name: size // parts[axis] for axis, fields in model.divided().items() for name, size in fields.items()}
    spec = model.model_copy(update=divided).spec()
    return _Work(spec, (*spec.stacks, *(StackSpec(pattern=(block,), repeats=1) for block in spec.mtp)))


@functools.lru_cache(maxsize=1024)
def _mesh(sizes: tuple[int, ...]) -> AbstractMesh:
    return AbstractMesh(sizes, AXES)


def abstract_mesh(sizes: Mapping[str, int]) -> Any:
    """A mesh without devices, which is enough to say where arrays would live: type it as the mesh it stands for."""
    return _mesh(tuple(sizes[axis] for axis in AXES))


@functools.lru_cache(maxsize=65536)
def _shard(mesh: AbstractMesh, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    return weight_sharding(mesh, axes, shape).shard_shape(shape)  # pyright: ignore[reportArgumentType]


class _Step:
    """The phases of a training step."""

    def __init__(self, config: RunConfig, layout: _Layout, arrays: _Arrays, *, at_least: bool):
        self.config, self.layout, self.weights = config, layout, arrays.weights
        self.spec, self.stacks = layout.work.spec, layout.work.stacks
        how = config.train
        length = how.seq_len if how.attention == "chunked" or not layout.kernels else _SHORT
        self.experts_aside = layout.mesh.size > 1 and how.experts.path not in ("capacity", "dense")
        fixed = {"d_model": self.spec.d_model, "seq_len": length, "numerics": numerics(config), "experts_aside": self.experts_aside}
        self.names, further = layout.work.names, len(self.spec.mtp)
        joined: list[Any] = [None] * (len(self.stacks) - further) + [self.spec.norm] * further
        costs = [pattern_cost(stack.pattern, **fixed, joined=norm) for stack, norm in zip(self.stacks, joined, strict=True)]
        self.stream = layout.rows * how.seq_len * self.spec.d_model * layout.itemsize
        rows = layout.rows * how.seq_len / length
        repeated = list(zip(self.stacks, costs, strict=True))
        self.saved_by_stack = [cost.once.at(rows) + stack.repeats * cost.each.at(rows) for stack, cost in repeated]
        self.host = sum(stack.repeats * cost.host.at(rows) for stack, cost in repeated)
        alone = layout.totals["fsdp"] == 1
        counted = self.experts_aside and not at_least
        aside = [layout.experts(stack, how) if counted else 0 for stack in layout.whole_work.stacks]
        self.working = [most(cost.working if alone else cost.shared, rows, at) for cost, at in zip(costs, aside, strict=True)]
        # What the last norm keeps, and its result, which the loss reads; of a depth the embeddings, the result, and its gradient, which the
        # loss makes at once.
        self.saved = sum(self.saved_by_stack) + (2 + 3 * further) * self.stream
        self.sizes = {path: layout.held(_Array(info, info.shape, 4)) for path, info in self.weights.items()}
        self.gradients = sum(self.sizes.values())
        self.moments = sum(layout.held(moment) for moment in arrays.moments)

    def phases(self) -> dict[str, int]:
        """Bytes beside the arguments at each phase's peak."""
        layers = self.names
        of_layers = [sum(size for path, size in self.sizes.items() if path.startswith(name)) for name in layers]
        looked_up = sum(self.sizes.get(name, 0) for name in _LOOKED_UP)
        head = self.gradients - sum(of_layers) - (0 if self.spec.tie_embeddings else looked_up)
        cast = sum(of_layers) * self.layout.itemsize // 4 if self.layout.kernels and self.layout.itemsize < 4 else 0
        # Each application of the head keeps its gradient until the backward pass adds them up.
        heads = len(self.spec.mtp) * self.sizes["embedding" if self.spec.tie_embeddings else "head"]
        phases = {"loss": self.saved + cast + self._loss() + heads}
        for number, working in enumerate(self.working):
            kept, made = sum(self.saved_by_stack[: number + 1]), sum(of_layers[number:])
            phases[layers[number]] = kept + cast + head + made + working + self._prefetched(number)
        tables = max((self.layout.whole(self.weights[name]) for name in _LOOKED_UP if name in self.weights), default=0)
        if self.layout.totals["fsdp"] > 1 and self.layout.totals["tensor"] == 1:
            tables = min(tables, 2 * BLOCK_BYTES)
        phases["embedding"] = self.gradients + (tables if self.layout.totals["fsdp"] > 1 or self.spec.tie_embeddings else 0)
        if self.config.train.accumulate > 1:
            phases = {name: size + self.gradients for name, size in phases.items()}
        settings = self.config.optimizer
        phases["update"] = self.gradients * (1 if settings.clip_norm is None else 2) + (self._fetched() if settings.offload else 0)
        return phases

    def _loss(self) -> int:
        if self._blocked_loss():
            # A block of the head in the type of activations, its gradient, both before and after the sum, and the states' gradient.
            block = min(BLOCK_BYTES, 4 * self.spec.d_model * self.spec.vocab_rows // self.layout.totals["tensor"])
            return round(2.5 * block) + self.stream * (1 + 4 // self.layout.itemsize)
        how, rows = self.config.train, self.layout.rows
        columns = max((c for c in range(1, how.seq_len + 1) if how.seq_len % c == 0 and c * rows <= max(how.loss_chunk, rows)), default=1)
        vocab = self.spec.vocab_rows // self.layout.totals["tensor"]
        head = {"vocab": vocab, "used": min(vocab, self.spec.vocab_size), "softcap": self.spec.final_softcap}
        fixed = {"dtype": how.compute_dtype, "z_loss": how.z_loss, "adds_in_place": self.layout.kernels}
        moments = loss_working(self.spec.d_model, **fixed, **head)
        return most(moments, rows * columns) + self.stream

    def _blocked_loss(self) -> bool:
        """Whether Tokamax's kernel serves, which takes the head a block of columns at a time; it refuses more than is looked at here."""
        how, spec = self.config.train, self.spec
        plain = not how.z_loss and spec.final_softcap is None and spec.vocab_rows == spec.vocab_size
        return self.layout.platform == "tpu" and how.loss != "chunked" and plain

    def _fetched(self) -> int:
        """Moments on the device while it updates: one weight's coming and one's going; where the host's memory is its own, all."""
        return min(self.moments, 4 * max(self.sizes.values())) if self.layout.kernels else self.moments

    def _prefetched(self, number: int) -> int:
        """The next layer's weights, gathered in the type of activations while a layer is at work."""
        if self.layout.totals["fsdp"] == 1:
            return 0
        stack, name = self.stacks[number], self.names[number]
        weights = [info for path, info in self.weights.items() if path.startswith(name)]
        # Experts are gathered by the layer that has them.
        whole = sum(self.layout.whole(info) for info in weights if not (self.experts_aside and "experts" in info.axes))
        return whole // stack.repeats * self.layout.itemsize // 4


def _larger_axes(config: RunConfig, layout: _Layout) -> str:
    """Which axes lower what a device has of the weights."""
    axes = ["fsdp", *(["expert"] if "expert" in config.model.divided() else []), "tensor"]
    *first, last = (f"mesh.{axis} (now {layout.totals[axis]})" for axis in axes)
    return f"a larger {', '.join(first)} or {last}"


def _advice(config: RunConfig, layout: _Layout, worst: str) -> dict[str, str]:
    """For each part the option that would lower it most, of those that are not at their end already."""
    how, settings = config.train, config.optimizer
    more = _larger_axes(config, layout)
    fewer = f"train.accumulate={2 * how.accumulate}" if layout.rows > 1 else f"mesh.tensor={2 * layout.totals['tensor']}"
    waiting = "optimizer.offload=false, for moments come back for the update" if settings.offload else fewer
    moments = "optimizer.kind=muon, which keeps one moment of a matrix instead of two" if settings.kind == "adamw" else more
    return {
        "weights": more,
        "optimizer": "nothing, for it is in the host's memory" if settings.offload else f"optimizer.offload=true, or {moments}",
        "gradients": "train.accumulate=1, which needs no sum beside them" if how.accumulate > 1 else more,
        "activations": "train.remat=full" if how.remat in ("none", "dots") else fewer,
        "temporaries": {"loss": f"train.loss_chunk={max(1, how.loss_chunk // 2)}", "update": waiting, "embedding": more}.get(worst, fewer),
        "inputs": "a smaller train.batch_size",
        "code": "nothing",
    }
