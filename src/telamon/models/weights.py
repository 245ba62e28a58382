"""A model's weights as one nested dict of arrays: made sharded, counted, and bound to a decoder.

Everything outside the forward (optimizer, checkpoints, conversion) sees weights as this plain tree, with dotted paths
such as `stacks.0.blocks.0.mixer.query`; `bind` makes a `Decoder` of it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from telamon.models.decoder import Decoder, Numerics
from telamon.models.spec import ModelSpec
from telamon.parallel.rules import weight_sharding

Weights = dict[str, Any]
"""Nested dict with string keys; leaves are arrays."""


@dataclass(frozen=True)
class WeightInfo:
    """What a weight declares. Shape and axes include the leading layer axis of a stacked weight."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    matrix: tuple[tuple[int, ...], tuple[int, ...]] | None
    """(input dims, output dims) of a linear map; None for scales and biases."""
    role: str
    """hidden, embedding, router, vector or buffer (see `telamon.layers.param`)."""
    used: float = 1.0
    """Share of it that works on a token: of an expert's weight, the experts chosen."""

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def active(self) -> int:
        """Values that work on a token."""
        return round(self.used * self.size)

    @property
    def narrowed(self) -> bool:
        """Whether a program that only runs the model may hold it in the type of activations: maps that are computed in that type."""
        return self.matrix is not None and self.role != "router"


class Model:
    """A spec and how it is run: everything but the weights' values. Holds no arrays; making one allocates nothing."""

    def __init__(self, spec: ModelSpec, numerics: Numerics | None = None):
        self.spec = spec
        self.numerics = numerics or Numerics()
        abstract = nnx.eval_shape(lambda: Decoder(spec, rngs=nnx.Rngs(0), numerics=self.numerics))
        self._graph, state = nnx.split(abstract)
        self.info: dict[str, Any] = _string_keys(_map_params(state, _info))
        """A `WeightInfo` for each weight, in the tree's structure."""

    def bind(self, weights: Weights) -> Decoder:
        """A decoder with these weights (arrays or tracers)."""
        return nnx.merge(self._graph, _int_keys(weights))

    def init(self, key: jax.Array) -> Weights:
        """Fresh weights in float32; call under jit with `out_shardings=self.shardings(mesh)` to make them in place."""
        decoder = Decoder(self.spec, rngs=nnx.Rngs(params=key), numerics=self.numerics)
        return _string_keys(_map_params(nnx.state(decoder), lambda param: param.get_value()))

    def abstract(self, mesh: Mesh | None = None) -> Weights:
        """Shapes and types, with shardings where a mesh is given."""

        def leaf(info: WeightInfo) -> jax.ShapeDtypeStruct:
            sharding = None if mesh is None else weight_sharding(mesh, info.axes, info.shape)
            return jax.ShapeDtypeStruct(info.shape, jnp.float32, sharding=sharding)

        return self.map_info(leaf)

    def shardings(self, mesh: Mesh) -> dict[str, Any]:
        """Where each weight lives on a mesh."""
        return self.map_info(lambda info: weight_sharding(mesh, info.axes, info.shape))

    def map_info(self, function: Callable[[WeightInfo], Any]) -> dict[str, Any]:
        """A tree of `function` of each weight's declaration."""
        return jax.tree.map(function, self.info, is_leaf=lambda x: isinstance(x, WeightInfo))

    @property
    def parameter_count(self) -> int:
        """Number of parameters: the sum of the tree's leaf sizes."""
        return sum(info.size for info in flatten(self.info).values())

    @property
    def active_parameters(self) -> int:
        """Parameters but those of experts that a token does not visit; both tables count."""
        return sum(info.active for info in flatten(self.info).values())

    @property
    def matmul_parameters(self) -> int:
        """Active parameters but what is looked up. The head counts as often as training applies it: once, and for each depth of `mtp`."""
        tied = self.spec.tie_embeddings
        looked_up = ("positions",) if tied else ("embedding", "positions")
        again = len(self.spec.mtp) * self.info["embedding" if tied else "head"].size
        return self.active_parameters + again - sum(self.info[name].size for name in looked_up if name in self.info)


def flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A nested dict as {dotted path: leaf}, in the tree's order."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: not isinstance(x, Mapping))
    return {".".join(str(key.key) for key in path): leaf for path, leaf in paths}


def sharded_shapes(model: Model, mesh: Mesh) -> dict[str, tuple[tuple[int, ...], NamedSharding]]:
    """For each weight its shape and where it lives, as `parallel.rules.check_sharded` reads them."""
    where = flatten(model.shardings(mesh))
    return {path: (info.shape, where[path]) for path, info in flatten(model.info).items()}


def _info(param: nnx.Variable) -> WeightInfo:
    shape, axes, matrix = tuple(param.shape), tuple(param.axes), param.matrix
    stacked = len(shape) - len(axes)  # a scanned stack adds the leading layer axis
    if matrix is not None:
        inputs, outputs = matrix
        matrix = tuple(dim + stacked for dim in inputs), tuple(dim + stacked for dim in outputs)
    return WeightInfo(shape, ("layers",) * stacked + axes, matrix, param.role, param.used)


def _map_params(state: Any, function: Callable[[nnx.Variable], Any]) -> Any:
    if isinstance(state, nnx.Variable):
        return function(state)
    return {key: _map_params(value, function) for key, value in state.items()}


def _string_keys(tree: Any) -> Any:
    return {str(key): _string_keys(value) for key, value in tree.items()} if isinstance(tree, Mapping) else tree


def _int_keys(tree: Any) -> Any:
    if not isinstance(tree, Mapping):
        return tree
    return {int(key) if key.isdigit() else key: _int_keys(value) for key, value in tree.items()}
