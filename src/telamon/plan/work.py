"""What a training step computes, as a short list of products and attention layers.

The list is read from the declarations of a model's weights, so it knows nothing of families; a benchmark may write one by
hand for a model that has no family yet.
"""

import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from telamon.config.schema import ModelConfig, RunConfig
from telamon.models.mtp import FURTHER
from telamon.models.spec import BlockSpec
from telamon.models.weights import Model, WeightInfo, flatten
from telamon.parallel.rules import WEIGHT_RULES
from telamon.watch.throughput import AttentionCost, attention_pairs, flops_per_token

ATTENTION = "attention"
"""Name of attention among what the backward pass may make again; products have their weight's name, as `ffn.gate`."""


@dataclass(frozen=True)
class Product:
    """Tokens times a weight."""

    name: str
    """The weight's path within its block, such as ``mixer.query``; ``head`` for the output head."""
    inputs: int
    """Features summed over."""
    outputs: int
    """Features made."""
    count: int = 1
    """Layers that have it."""
    copies: int = 1
    """Experts that a layer holds; 0 where the other factor is no weight, as when tokens are sent to experts by one-hot products."""
    used: float = 1.0
    """Experts that a token goes through; computed with a capacity, times its factor."""
    split: Literal["inputs", "outputs"] | None = None
    """Which of its sizes the mesh's `tensor` axis splits."""
    needed: bool = True
    """Its result is read by the backward pass of its block; the last product before the stream is only added to it."""
    kept: bool = True
    """Its result may be kept for the backward pass; those of experts that drop nothing are made again instead, whatever else is kept."""

    @property
    def parameters(self) -> int:
        """Values in all its weights."""
        return self.inputs * self.outputs * self.count * self.copies


@dataclass(frozen=True)
class Attention:
    """Attention layers that are alike."""

    heads: int
    """Query heads N."""
    head_dim: int
    """Features of a head H."""
    window: int | None = None
    """Keys a query sees at most, itself included; none: all before it."""
    chunk: int | None = None
    """Length of the chunks that attention stays in; none: not chunked."""
    count: int = 1
    """Layers."""
    value_dim: int | None = None
    """Features of a value; none: as many as a key has."""

    @property
    def widths(self) -> tuple[int, int]:
        """Features of a key, of which a score is made, and of a value."""
        return self.head_dim, self.value_dim or self.head_dim

    def pairs(self, seq_len: int) -> float:
        """Query-key pairs of a row, each counted: half the diagonal is not left out."""
        return attention_pairs(seq_len, window=self.window, chunk=self.chunk, exact=True)


@dataclass(frozen=True)
class Workload:
    """What a model does for a token."""

    d_model: int
    """Width D of the stream."""
    vocab: int
    """Columns of the head V."""
    layers: int
    """Blocks L."""
    norms: int
    """Norms that a token's stream goes through."""
    products: tuple[Product, ...]
    """Products within blocks."""
    attention: tuple[Attention, ...]
    other: int
    """Parameters beside those of the products: tables, head, norms, biases."""
    matmul_parameters: int
    """Parameters that a token is multiplied with, by the MFU rule."""
    heads: int = 1
    """Times that the head is applied: once, and once for each depth of multi-token prediction."""

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.other + sum(product.parameters for product in self.products)

    def flops_per_token(self, seq_len: int) -> float:
        """Model FLOPs by the MFU rule (see `telamon.watch.throughput`)."""
        layers = (
            AttentionCost(layer.heads * sum(layer.widths) / 2, window=layer.window, chunk=layer.chunk)
            for layer in self.attention
            for _ in range(layer.count)
        )
        return flops_per_token(self.matmul_parameters, seq_len=seq_len, attention=layers)


def workload(config: RunConfig) -> Workload:
    """What the model of a run does, from what its weights declare; the second call for the same model costs nothing."""
    frozen: Any = config.model  # so it has a hash, which pydantic does not tell type checkers
    work, how = _workload(frozen), config.train.experts
    return with_capacity(work, how.capacity_factor) if how.path == "capacity" else work


def with_capacity(work: Workload, factor: float) -> Workload:
    """Where each expert computes as many places as an even load would take, times a factor, filled or not.

    What experts give is then an array like others: read by the backward pass, for the gradients of weights in the tokens' sums, and kept where
    it is to be.
    """

    def changed(product: Product) -> Product:
        return replace(product, used=factor * product.used, needed=True, kept=True) if product.copies > 1 else product

    return replace(work, products=tuple(map(changed, work.products)))


@functools.lru_cache(maxsize=32)
def _workload(config: ModelConfig) -> Workload:
    model = Model(spec := config.spec())
    products, every = tuple(_merged(_products(model))), (*spec.blocks, *spec.mtp)
    return Workload(
        d_model=spec.d_model,
        vocab=spec.vocab_rows,
        layers=len(every),
        norms=1 + 3 * len(spec.mtp) + sum(4 if block.norms == "sandwich" else 2 for block in every),
        products=products,
        attention=tuple(_attention(model)),
        other=model.parameter_count - sum(product.parameters for product in products),
        matmul_parameters=model.matmul_parameters,
        heads=1 + len(spec.mtp),
    )


_SPLIT = {axis for axis, mesh_axes in WEIGHT_RULES.items() if "tensor" in mesh_axes}


class _Block(NamedTuple):
    """A block of a stack's pattern: its spec, how often it repeats, and its weights by their path within it.

    A depth of multi-token prediction is a block too, with the projection that it has beside one.
    """

    spec: BlockSpec
    repeats: int
    weights: dict[str, WeightInfo]


def _blocks(model: Model) -> Iterator[_Block]:
    for stack, declared in zip(model.spec.stacks, model.info["stacks"].values(), strict=True):
        for block, weights in zip(stack.pattern, declared["blocks"].values(), strict=True):
            yield _Block(block, stack.repeats, flatten(weights))
    for block, weights in zip(model.spec.mtp, model.info.get(FURTHER, {}).values(), strict=True):
        yield _Block(block, 1, {path.removeprefix("block."): info for path, info in flatten(weights).items()})


def _products(model: Model) -> Iterator[Product]:
    for block in _blocks(model):
        for name, info in block.weights.items():
            if info.matrix is None:
                continue
            inputs, outputs = (math.prod(info.shape[dim] for dim in dims) for dims in info.matrix)
            split = [{info.axes[dim] for dim in dims} & _SPLIT for dims in info.matrix]
            copies = info.size // (inputs * outputs * block.repeats)
            last = name.startswith("ffn.") and info.axes[-1] == "embed"
            yield Product(
                name,
                inputs=inputs,
                outputs=outputs,
                count=block.repeats,
                copies=copies,
                used=copies * info.used,
                split="inputs" if split[0] else "outputs" if split[1] else None,
                needed=not last or block.spec.norms != "pre",
                kept=copies == 1,
            )


def _attention(model: Model) -> Iterator[Attention]:
    layers: Counter[Attention] = Counter()
    for block in _blocks(model):
        mixer = block.spec.mixer
        heads, key, value = mixer.attention_sizes
        if heads:
            sizes = Attention(heads, key, mixer.attention_window, mixer.attention_chunk, value_dim=None if value == key else value)
            layers[sizes] += block.repeats
    for layer, count in layers.items():
        yield replace(layer, count=count)


def _merged(products: Iterable[Product]) -> Iterator[Product]:
    """Products that differ in nothing but their layers, as one."""
    counts: Counter[Product] = Counter()
    for product in products:
        counts[_counted(product, 1)] += product.count
    return (_counted(product, count) for product, count in counts.items())


def _counted(product: Product, count: int) -> Product:
    return Product(**{**vars(product), "count": count})
