"""What a training step should cost, by arithmetic: a roofline for each class of operation, and a model of the links.

Nothing is compiled and nothing is fitted to a run: a chip has one set of constants (`presets/hardware`), from data sheets,
and three shares that `benchmarks A3` fits to published figures, each tested on rows that it was not fitted to.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from telamon.config.checks import BATCH_AXES, check_devices
from telamon.config.hardware import Chip
from telamon.config.schema import AXES, RunConfig
from telamon.plan.links import Group, groups
from telamon.plan.topology import Topology
from telamon.plan.work import ATTENTION, Attention, Product, Workload, workload

RULE = (
    "Time is the sum of: products at matmul_share of the peak, or at the memory's bandwidth where that is slower, with sizes rounded up to "
    "the matrix unit; attention at attention_share of the peak over the pairs that exist, its backward pass 2.5 times its forward one; what "
    "stands between products at the memory's bandwidth, each result written and read once; the loss and the optimizer likewise; and what the "
    "backward pass makes again. Gathering weights and scattering gradients hides behind products and attention, hidden_share of it at best; "
    "copies of activations to and from the host hide behind these too; activations' collectives, and moments that come from the host, do not."
)
"""The model in words."""

_ACTIVATION_BYTES = 2
_LOGIT_BYTES = 18
"""For each logit: in float32 written once and read twice, its gradient in bfloat16 written once and read twice."""
_UPDATE_BYTES = 32
"""For each parameter, in float32: weight, gradient and two moments read, all but the gradient written, the gradient's norm."""
_MOMENT_BYTES = 8
"""Two moments of a parameter, in float32."""
_ATTENTION_BACKWARD = 2.5
"""Products of attention's backward pass over those of its forward pass: 5 over 2, as scores are made again."""


_MUON_STEPS = 5
"""Newton-Schulz steps that Muon takes, each three products (Jordan et al. 2024)."""


@dataclass(frozen=True)
class Layout:
    """How a step is laid out on devices."""

    rows: int
    """Rows that a device, or the devices of one `tensor` group, has of a microbatch."""
    within: Mapping[str, int]
    """Size of each mesh axis within a slice; axes that are not named have size 1."""
    across: Mapping[str, int] = field(default_factory=dict)
    """How often each axis is repeated across slices."""
    accumulate: int = 1
    """Microbatches a step."""
    saved: frozenset[str] | None = None
    """What the backward pass finds saved: names of products, and `attention`; none: everything, so that nothing is made again."""
    gradient_bytes: int = 4
    """Bytes of a gradient on the links."""
    weight_bytes: int = 2
    """Bytes of a gathered weight."""
    offload_inputs: bool = False
    """The inputs of blocks wait in the host's memory for the backward pass."""
    offload_moments: bool = False
    """The optimizer's moments live in the host's memory."""
    muon: bool = False
    """Hidden matrices are updated by Muon; otherwise, as all other weights, by AdamW."""

    def sizes(self, which: Mapping[str, int]) -> dict[str, int]:
        """All axes' sizes."""
        return {axis: which.get(axis, 1) for axis in AXES}

    def total(self, *axes: str) -> int:
        """Devices along these axes, over all slices."""
        return math.prod(self.within.get(axis, 1) * self.across.get(axis, 1) for axis in axes)

    def again(self, name: str) -> bool:
        """Whether the backward pass makes this again, if it needs it."""
        return self.saved is not None and name not in self.saved


@dataclass(frozen=True)
class CollectiveCost:
    """A kind of collective over a mesh axis, all of a step together."""

    kind: str
    axis: str
    bytes: float
    """Bytes of the arrays when whole; for an all-to-all, of a device's part."""
    seconds: float
    exposed: float
    """Seconds that nothing hides."""


@dataclass(frozen=True)
class Prediction:
    """What a step should take."""

    step_seconds: float
    tokens_per_second_per_device: float
    mfu: float
    """By the rule of `telamon.watch.throughput`."""
    parts: Mapping[str, float]
    """Seconds of each class of operation; their sum and the exposed parts of collectives are the step."""
    collectives: tuple[CollectiveCost, ...]
    rule: str = RULE


def predict(config: RunConfig, topology: Topology, layout: Layout | None = None) -> Prediction:
    """Time of a training step of a run. Pure arithmetic: milliseconds, no compiler.

    Args:
        config: the run.
        topology: the machine.
        layout: default the run's own mesh, batch and recomputation.

    Raises:
        ConfigError: the run does not fit the number of devices.
    """
    work = workload(config)
    return predict_work(work, layout or layout_of(config, topology), topology, seq_len=config.train.seq_len)


def layout_of(config: RunConfig, topology: Topology) -> Layout:
    """How a run lays out its step on a topology.

    Raises:
        ConfigError: the run does not fit the number of devices.
    """
    train = config.train
    products = frozenset(product.name for product in workload(config).products)
    layout = Layout(
        rows=1,
        within=check_devices(config, topology.device_count).sizes(),
        across=config.mesh.cross_slice.sizes(),
        accumulate=train.accumulate,
        saved={"none": None, "dots": products, "full": frozenset(), "offload": frozenset()}[train.remat],
        weight_bytes={"bfloat16": 2, "float32": 4}[train.compute_dtype],
        offload_inputs=train.remat == "offload",
        offload_moments=config.optimizer.offload,
        muon=config.optimizer.kind == "muon",
    )
    rows = train.batch_size // train.accumulate // layout.total(*BATCH_AXES)
    return Layout(**{**vars(layout), "rows": rows})


def predict_work(work: Workload, layout: Layout, topology: Topology, *, seq_len: int) -> Prediction:
    """Time of a step of a workload laid out in a given way (see `predict`)."""
    step = _Step(work, layout, topology.chip, seq_len)
    parts = dict(step.parts())
    joined = groups(topology, layout.sizes(layout.within), layout.sizes(layout.across))
    room = sum(parts[name] for name in parts if name.startswith(("products", "attention")))
    parts["host"] = step.host(room)
    collectives = tuple(_exposed(step.collectives(joined), room, topology.chip.hidden_share))
    seconds = sum(parts.values()) + sum(collective.exposed for collective in collectives)
    tokens = layout.rows * layout.accumulate * layout.total(*BATCH_AXES) * seq_len
    rate = tokens / seconds / topology.device_count
    mfu = rate * work.flops_per_token(seq_len) / topology.chip.flops
    return Prediction(seconds, rate, mfu, parts, collectives)


_HIDES = {("all-gather", "fsdp"), ("reduce-scatter", "fsdp"), ("all-reduce", "data"), ("all-reduce", "expert")}


def _exposed(collectives: Iterable[CollectiveCost], room: float, share: float) -> Iterator[CollectiveCost]:
    """The overlap rule: a `share` of the weights' collectives hides, as long as there are `room` seconds to hide behind."""
    found = [collective for collective in collectives if collective.seconds]
    weights = sum(collective.seconds for collective in found if (collective.kind, collective.axis) in _HIDES)
    hidden = min(share, room / weights) if weights else 0.0
    for collective in found:
        kept = 1 - hidden if (collective.kind, collective.axis) in _HIDES else 1.0
        yield CollectiveCost(**{**vars(collective), "exposed": collective.seconds * kept})


@dataclass(frozen=True)
class _Step:
    """A device's part of a step."""

    work: Workload
    layout: Layout
    chip: Chip
    seq_len: int

    @property
    def memory(self) -> float:
        """Bytes a second of a device's memory."""
        return self.chip.hbm_gbps * 1e9 / self.chip.devices_per_chip

    @property
    def tokens(self) -> int:
        """Tokens that a device has of a microbatch (with those it shares a `tensor` group with)."""
        return self.layout.rows * self.seq_len

    @property
    def tensor(self) -> int:
        """Devices that split a product."""
        return self.layout.total("tensor")

    def parts(self) -> Iterator[tuple[str, float]]:
        """Seconds of each class of operation, all microbatches together."""
        times = self.layout.accumulate
        for product in self.work.products:
            yield f"products {product.name}", times * self.passes(product) * self.product(product)
        yield "attention", times * sum(self.attention(layer) for layer in self.work.attention)
        yield "between products", times * self.between()
        yield "loss", times * self.loss()
        yield "optimizer", _UPDATE_BYTES * self.parameters() / self.layout.total("fsdp") / self.memory
        if self.layout.muon:
            yield "muon", sum(map(self.orthogonal, self.work.products))

    def passes(self, product: Product) -> int:
        """Forward, the gradients of both factors, and once more where the result is needed and was not saved."""
        return 3 + (product.needed and (self.layout.again(product.name) or not product.kept))

    def product(self, product: Product) -> float:
        """Seconds of one pass over all layers."""
        inputs = product.inputs // (self.tensor if product.split == "inputs" else 1)
        outputs = product.outputs // (self.tensor if product.split == "outputs" else 1)
        rows = self.tokens * product.used
        held = product.copies // self.layout.total("expert") or 1
        filled = self.filled(rows / held) * self.filled(inputs) * self.filled(outputs)
        computing = 2 * rows * inputs * outputs / (self.chip.flops * self.chip.matmul_share * filled)
        moving = _ACTIVATION_BYTES * (rows * (inputs + outputs) + held * inputs * outputs) / self.memory
        return product.count * max(computing, moving)

    def attention(self, layer: Attention) -> float:
        """Seconds of all passes over all of these layers."""
        passes = 1 + _ATTENTION_BACKWARD + self.layout.again(ATTENTION)
        pairs = layer.heads / self.tensor * layer.pairs(self.seq_len) * self.layout.rows
        flops = sum(2 * pairs * width / self.filled(width) for width in layer.widths)
        return passes * layer.count * flops / (self.chip.flops * self.chip.attention_share)

    def between(self) -> float:
        """Seconds of norms, rotations, activations and sums: memory traffic alone. Backward it is twice that of forward."""
        results = sum(product.count * product.used * product.outputs / self._splits(product) for product in self.work.products)
        passes = 3 + (self.layout.saved is not None)
        values = 2 * (results + (self.work.norms + self.sorted_rows()) * self.work.d_model)
        return passes * _ACTIVATION_BYTES * values * self.tokens / self.memory

    def sorted_rows(self) -> float:
        """Rows of the stream that are written in the order of experts, and back in that of tokens, for each token."""
        if any(product.copies == 0 for product in self.work.products):
            return 0.0  # one-hot products do that, and their results count already
        return 2 * sum(product.count * product.used for product in self.work.products if product.copies > 1 and product.split == "inputs")

    def loss(self) -> float:
        """Seconds of the head's three products and of the logits' traffic, as often as it is applied."""
        head = Product("head", self.work.d_model, self.work.vocab, split="outputs")
        once = 3 * self.product(head) + _LOGIT_BYTES * self.tokens * self.work.vocab / self.tensor / self.memory
        return self.work.heads * once

    def orthogonal(self, product: Product) -> float:
        """Seconds in which Muon makes the gradients of these weights orthogonal; a device does its part of each product."""
        short, long = sorted((product.inputs, product.outputs))
        flops = _MUON_STEPS * (4 * short**2 * long + 2 * short**3) * product.count * product.copies
        devices = self.layout.total("fsdp") * self._splits(product, weights=True)
        filled = self.filled(short) ** 2 * self.filled(long)
        return flops / devices / (self.chip.flops * self.chip.matmul_share * filled)

    def host(self, room: float) -> float:
        """Seconds of copies to and from the host, which go both ways at once, that `room` seconds of computing do not hide.

        Inputs of blocks go while others compute; moments come and go in the update, when nothing else is left to do.
        """
        inputs = _ACTIVATION_BYTES * self.tokens * self.layout.accumulate * self.work.d_model * self.work.layers
        moments = _MOMENT_BYTES * self.parameters() / self.layout.total("fsdp")
        rate = self.chip.host_gbps * 1e9 / self.chip.devices_per_chip
        return max(0.0, 2 * self.layout.offload_inputs * inputs / rate - room) + self.layout.offload_moments * moments / rate

    def filled(self, size: float) -> float:
        """Share of the matrix unit that a size fills."""
        return size / (math.ceil(size / self.chip.tile) * self.chip.tile)

    def parameters(self, *, experts: bool = True) -> float:
        """Parameters of a device before `fsdp` splits them, with those of experts or without."""
        products = (p for p in self.work.products if experts or p.copies <= 1)
        return self.work.other / self.tensor + sum(p.parameters / self._splits(p, weights=True) for p in products)

    def _splits(self, product: Product, *, weights: bool = False) -> int:
        """How many devices share the weights, or the results, of a product."""
        if weights:
            return (self.tensor if product.split else 1) * (self.layout.total("expert") if product.copies > 1 else 1)
        return self.tensor if product.split == "outputs" else 1

    def collectives(self, joined: Mapping[str, Group]) -> Iterator[CollectiveCost]:
        """All of a step's, none hidden yet."""
        layout, times, held = self.layout, self.layout.accumulate, self.parameters()
        gathered, scattered = 2 * times * layout.weight_bytes * held, times * layout.gradient_bytes * held
        yield _cost("all-gather", "fsdp", gathered, joined["fsdp"].gather(gathered))
        yield _cost("reduce-scatter", "fsdp", scattered, joined["fsdp"].gather(scattered))
        if layout.muon:
            matrices = sum(p.parameters / self._splits(p, weights=True) for p in self.work.products)
            again = _MUON_STEPS * layout.weight_bytes * matrices  # as the compiler lays it out: each step gathers a factor once
            yield _cost("all-gather of muon", "fsdp", again, joined["fsdp"].gather(again))
        summed = layout.gradient_bytes * held / layout.total("fsdp")
        yield _cost("all-reduce", "data", summed, joined["data"].reduce(summed))
        shared = layout.gradient_bytes * self.parameters(experts=False) / layout.total("fsdp")
        yield _cost("all-reduce", "expert", shared, joined["expert"].reduce(shared))
        stream = _ACTIVATION_BYTES * self.tokens * self.work.d_model * times
        partial = stream * (1 + sum(self._sums(p) for p in self.work.products if p.split == "inputs"))
        yield _cost("all-reduce", "tensor", partial, joined["tensor"].reduce(partial))
        sent = stream * sum(self._sends(p) for p in self.work.products if p.copies > 1 and p.split == "inputs")
        yield _cost("all-to-all", "expert", sent, joined["expert"].exchange(sent))

    def _sums(self, product: Product) -> float:
        """Times that the stream is summed over `tensor` for a part of all blocks: forward, backward, and where made again."""
        return product.count * product.used * (self.passes(product) - 1)

    def _sends(self, product: Product) -> float:
        """Times that rows of the stream go to experts or come back: both forward; backward there once more, with their gradients, and back."""
        return product.count * product.used * 5


def _cost(kind: str, axis: str, size: float, seconds: float) -> CollectiveCost:
    return CollectiveCost(kind, axis, size, seconds, seconds)
