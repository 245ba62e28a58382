"""Experts on eight devices make what the dense way makes on one, however tokens choose: outputs and all gradients."""

import json
import math
import os
import subprocess
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from telamon.config.schema import MeshConfig
from telamon.layers import sharded_experts
from telamon.layers.experts import Experts
from telamon.layers.router import Routing
from telamon.parallel import experts as parallel_experts
from telamon.parallel.experts import Turns
from telamon.parallel.mesh import build_mesh
from telamon.parallel.rules import batch_sharding

pytestmark = pytest.mark.xdist_group("mesh")

B, T, E, X = 8, 12, 8, 2
_ONE_EXPERT = 3 * 4 * 16 * 32


class _Case(NamedTuple):
    mesh: dict[str, int]
    forced: bool
    """All tokens choose the same two experts."""
    bias: bool = False
    weigh_input: bool = False
    block: int = 2**30
    """Bytes of gradients of a block of experts."""
    turn: int = 2**29
    """Bytes of rows that travel in a turn; 1: as few as there can be, so that there are several."""
    sizes: tuple[int, int] = (16, 32)
    """Widths D and F."""


CASES = {
    "expert 8": _Case({"expert": 8}, forced=True),
    "expert 4, fsdp 2, an expert at a time": _Case({"expert": 4, "fsdp": 2}, forced=False, block=_ONE_EXPERT),
    "expert 2, fsdp 2, tensor 2, biases": _Case({"expert": 2, "fsdp": 2, "tensor": 2}, forced=True, bias=True, block=_ONE_EXPERT, turn=1),
    "fsdp 8, two experts at a time": _Case({"fsdp": 8}, forced=True, block=2 * _ONE_EXPERT, turn=1),
    "fsdp 4, which splits whole experts": _Case({"fsdp": 4}, forced=False, block=4 * 3 * 4 * 18 * 30, sizes=(18, 30)),
    "data 2, tensor 2, weights on the input": _Case({"data": 2, "tensor": 2}, forced=False, bias=True, weigh_input=True),
}


def _routing(rng: np.random.Generator, *, forced: bool) -> Routing:
    """Choices with a row that is half padding."""
    logits = rng.standard_normal((B, T, E))
    logits[..., [3, 5]] += 100.0 * forced
    experts, weights = np.argsort(-logits, -1)[..., :X].astype(np.int32), rng.random((B, T, X)).astype(np.float32)
    experts[2, 5:], weights[2, 5:] = E, 0
    return Routing(jnp.asarray(experts), jnp.asarray(weights))


@pytest.mark.parametrize("name", CASES)
def test_what_devices_make_together_is_what_one_makes(name: str, monkeypatch: pytest.MonkeyPatch):
    case = CASES[name]
    D, F = case.sizes
    monkeypatch.setattr(sharded_experts, "BLOCK_BYTES", case.block)
    monkeypatch.setattr(parallel_experts, "TURN_BYTES", case.turn)
    how: Any = {"activation": "swiglu_oss", "limit": 2.0} if case.bias else {"activation": "silu", "limit": None}
    layer = Experts(count=E, chosen=X, d_model=D, d_ff=F, bias=case.bias, weigh_input=case.weigh_input, scale=1.0, rngs=nnx.Rngs(0), **how)
    graph, state = nnx.split(layer)
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda w: w + jnp.asarray(0.1 * rng.standard_normal(w.shape), jnp.float32), state)
    x, pull = (jnp.asarray(rng.standard_normal((B, T, D)), jnp.float32) for _ in range(2))
    experts, weights = _routing(rng, forced=case.forced)

    def value(dense: bool, state: Any, x: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        layer, routing = nnx.merge(graph, state), Routing(experts, weights)
        y = layer.dense(x, routing) if dense else layer.without_dropping(x, routing, path="auto")
        return jnp.sum(y * pull), y

    gradient = jax.jit(jax.value_and_grad(value, argnums=(1, 2, 3), has_aux=True), static_argnums=0)
    (_, expected), expected_gradients = gradient(True, state, x, weights)
    mesh = build_mesh(MeshConfig(fsdp=1).model_copy(update=case.mesh), devices=jax.devices()[: math.prod(case.mesh.values())])
    with jax.set_mesh(mesh):
        rows = jax.device_put((x, weights), batch_sharding(mesh))
        (_, made), gradients = gradient(False, state, *rows)
        (_, again), _ = gradient(False, state, *rows)
    np.testing.assert_array_equal(made, again)
    np.testing.assert_array_equal(made[2, 5:], 0)
    np.testing.assert_allclose(made, expected, rtol=1e-5, atol=1e-5)
    paths = jax.tree_util.tree_leaves_with_path(expected_gradients)
    for (path, wanted), found in zip(paths, jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=2e-5, err_msg=str(path))


def test_a_turn_is_bounded_in_bytes_and_holds_an_even_load_where_that_is_less():
    """8,192 tokens of width 7,168 with 8 choices on 8 devices, in bfloat16; all at once would take 7.5 GB for the worst case."""
    sizes: Any = {"peers": 8, "size": 32, "tokens": 8192, "choices": 8, "row_bytes": 2 * 7168}
    at_once = Turns.of(blocks=1, **sizes)
    assert at_once.rows * 8 * 2 * 7168 <= 2**29 < 8192 * 8 * 8 * 2 * 7168
    in_blocks = Turns.of(blocks=8, **{**sizes, "size": 4})
    assert in_blocks.rows == 1.5 * 8192 * 8 / (8 * 8)
    few = Turns.of(blocks=1, **{**sizes, "tokens": 3, "choices": 2})
    assert few.rows == 6, "no more than there are"


PROGRAMS = """
import json, jax, jax.numpy as jnp
from telamon.config.schema import MeshConfig
from telamon.layers.sharded_experts import AXES, ExpertWeights, Kind, on_devices
from telamon.parallel.mesh import build_mesh
from telamon.parallel.rules import batch_sharding, weight_sharding
from telamon.plan.topology import aot_devices, parse_topology

def lowered(topology):
    mesh = build_mesh(MeshConfig(expert=2, fsdp=2), devices=aot_devices(parse_topology(topology)))
    B, T, D, E, X = 4, 64, 128, 4, 2
    maps = {name: jax.ShapeDtypeStruct((E, D, D), jnp.float32, sharding=weight_sharding(mesh, AXES[name], (E, D, D))) for name in ("gate", "up", "down")}
    tokens = ((D, "bfloat16"), (X, "int32"), (X, "float32"))
    x, experts, weights = (jax.ShapeDtypeStruct((B, T, n), dtype, sharding=batch_sharding(mesh)) for n, dtype in tokens)

    def loss(x, experts, weights, w):
        return jnp.sum(jnp.square(on_devices(Kind("silu", None, False, "blocked"), x, experts, weights, w).astype(jnp.float32)))

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(jax.grad(loss, (0, 2, 3))).lower(x, experts, weights, ExpertWeights(**maps))

compiled = lowered("v5e:2x2").compile().as_text()
print(json.dumps([compiled.count(" ragged-all-to-all-start("), lowered("h100:4").as_text().count("ragged_all_to_all")]))
"""


def test_rows_travel_ragged_on_tpus_and_gpus():
    """In the program that a TPU's compiler makes, and in that for H100's: two all-to-alls of rows forward, three backward."""
    options = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "XLA_FLAGS": ""}
    done = subprocess.run([sys.executable, "-c", PROGRAMS], env=os.environ | options, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [5, 5]
