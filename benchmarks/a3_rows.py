"""Published training speeds, each with the layout that was published with it."""

import functools
from dataclasses import dataclass, replace

from telamon.config.load import load_run
from telamon.plan.cost import Layout, layout_of
from telamon.plan.search import search
from telamon.plan.topology import Topology, parse_topology
from telamon.plan.work import ATTENTION, Product, Workload, with_capacity, workload

_QKV = frozenset({"mixer.query", "mixer.key", "mixer.value"})
_OUT, _DOWN, _ATTENTION = frozenset({"mixer.out"}), frozenset({"ffn.down"}), frozenset({ATTENTION})
_NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Row:
    """A published figure."""

    model: str
    machine: str
    seq_len: int
    published: float
    """Tokens a second and JAX device."""
    rows: int | None
    """Rows of a device; none: no layout was published, and the search picks one."""
    saved: frozenset[str] | None
    """What the backward pass finds saved, on the device or offloaded (see `Layout`)."""
    source: str
    """Where the layout is from."""
    experts: int = 1
    """Devices along the `expert` axis; all others are on `fsdp`."""
    capacity: float | None = None
    """A mixture's capacity factor, with tokens sent by one-hot products; none: no token is dropped."""

    @property
    def topology(self) -> Topology:
        """The machine."""
        return parse_topology(self.machine)

    @property
    def layout(self) -> Layout:
        """How the step is laid out; types on the links are this program's."""
        topology = self.topology
        if self.rows is None:
            return _searched(self.model, topology, self.seq_len)
        within = {"fsdp": topology.devices_per_slice // self.experts, "expert": self.experts}
        return Layout(rows=self.rows, within=within, across={"fsdp": topology.slices}, saved=self.saved)

    @property
    def work(self) -> Workload:
        """What the model computes: that of its preset. What experts give is needed backward, as MaxText computes it."""
        work = workload(load_run("default", [f"model.preset={self.model}"]).config)
        return with_capacity(work, 1.0) if self.capacity is None else one_hot(with_capacity(work, self.capacity), seq_len=self.seq_len)

    @property
    def mixture(self) -> bool:
        """The model has experts."""
        return any(product.copies > 1 for product in self.work.products)


@functools.cache
def _searched(model: str, topology: Topology, seq_len: int) -> Layout:
    """The layout that `telamon plan --search` ranks first, with the constants that are shipped."""
    config = load_run("default", [f"model.preset={model}", f"train.seq_len={seq_len}", "optimizer.kind=adamw"]).config
    return layout_of(search(config, topology, free_batch=True).candidates[0].config, topology)


def one_hot(work: Workload, *, seq_len: int) -> Workload:
    """A mixture whose experts' places are filled and emptied by products of a row's tokens and a one-hot array of all places."""
    (sent,) = (product for product in work.products if product.copies > 1 and product.split == "inputs")
    places = int(sent.used * seq_len)
    there = Product("ffn.dispatch", places, work.d_model, sent.count, copies=0)
    back = Product("ffn.combine", places, work.d_model, sent.count, copies=0, needed=False)
    return replace(work, products=(*work.products, there, back))


_RECIPES = "tpu-recipes of AI-Hypercomputer, training"

ROWS = (
    Row("llama3.1-8b", "v6e:16x16", 8192, 7207, 4, _QKV | _OUT, f"{_RECIPES}/trillium/Llama3.1-8B-MaxText/v6e-256"),
    Row("llama3.1-70b", "v6e:16x16", 8192, 960, 5, _QKV, f"{_RECIPES}/trillium/Llama3.1-70B-MaxText/v6e-256"),
    Row("llama3.1-405b", "v6e:16x16", 8192, 150, 1, _NOTHING, f"{_RECIPES}/trillium/Llama3.1-405B-MaxText; measured on two such slices"),
    Row("llama2-70b", "v6e:16x16", 4096, 900, 2, _QKV, f"{_RECIPES}/trillium/Llama2-70B-MaxText, rows as in its log"),
    Row("mixtral-8x7b", "v6e:16x16", 4096, 3899, 12, _QKV | _OUT, f"{_RECIPES}/trillium/Mixtral-8x7B-MaxText", capacity=1.25),
    Row(
        "mixtral-8x22b",
        "v6e:16x16",
        4096,
        1326,
        8,
        _QKV | _OUT,
        "MaxText, benchmarks/maxtext_trillium_model_configs.py, mixtral_8x22b_dropped",
        experts=4,
        capacity=1.25,
    ),
    Row("llama2-70b", "v5p:4x8x8", 4096, 692, 4, _QKV | _OUT | _DOWN, "MaxText, configs/tpu/v5p/llama2_70b.sh"),
    Row(
        "llama3.1-405b",
        "v5p:4x8x8",
        8192,
        125,
        2,
        _ATTENTION | _DOWN,
        f"{_RECIPES}/v5p/Llama3.1-405B-MaxText; its log is of twice the chips",
    ),
    Row("mixtral-8x7b", "v5p:4x4x8", 4096, 2909, 36, _NOTHING, f"{_RECIPES}/v5p/Mixtral-8X7B-Maxtext"),
    Row("llama3.1-70b", "tpu7x:4x4x4", 8192, 2687 / 2, 2, _QKV | _ATTENTION, f"{_RECIPES}/ironwood/llama3.1-70b/8k-bf16-tpu7x-4x4x4"),
    Row(
        "llama3.1-405b",
        "tpu7x:4x8x8",
        8192,
        500 / 2,
        3,
        _DOWN | {"mixer.key", "mixer.value"},
        f"{_RECIPES}/ironwood/llama3.1-405b/8k-bf16-tpu7x-4x8x8",
    ),
    Row("llama2-7b", "h100:8", 4096, 11361, 4, None, "MaxText, configs/gpu/models/llama2_7b.yml"),
    Row("llama3-70b", "h100:8x16", 8192, 1052, None, None, "the figure came without a layout; this one is what the search ranks first"),
)
