"""A model's weights: counted from the tree, the same for one seed on any mesh, and described well enough to shard them."""

from typing import Any

import jax
import numpy as np
import pytest
import tiny

from telamon.config.schema import MeshConfig
from telamon.models.weights import flatten, sharded_shapes
from telamon.parallel.mesh import build_mesh
from telamon.train.state import weights_hash

SMALL: dict[str, Any] = {"vocab_size": 11, "d_model": 8, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 2, "d_ff": 16}


@pytest.mark.parametrize(
    ("family", "tied", "parameters", "matmul"),
    [("llama", True, 1280, 1280), ("llama", False, 1368, 1280), ("qwen3", True, 1288, 1288), ("olmo2", True, 1304, 1304)],
)
def test_parameters_are_counted_from_the_tree(family: str, tied: bool, parameters: int, matmul: int):
    """2 layers, V 11, D 8, F 16, 4 query and 2 KV heads of 2; tied and untied heads cost the same work.

    Norms of queries and keys add a scale per feature of a head (Qwen3), or per feature of all heads together (OLMo 2)."""
    model = tiny.model(family, **SMALL, tie_embeddings=tied)
    assert model.parameter_count == parameters
    assert model.parameter_count == sum(leaf.size for leaf in jax.tree.leaves(model.abstract()))
    assert model.matmul_parameters == matmul
    assert [block.mixer.attention_width for block in model.spec.blocks] == [8, 8]


def test_making_a_model_allocates_nothing():
    before = len(jax.live_arrays())
    model = tiny.model(d_model=4096, d_ff=16384, n_heads=32, head_dim=128, n_layers=64, vocab_size=128_000)
    assert model.parameter_count > 10**10
    assert len(jax.live_arrays()) == before


def test_every_weight_says_what_it_is():
    model = tiny.model("qwen3", attention_bias=True, tie_embeddings=False)
    info = flatten(model.info)
    stacked = "stacks.0.blocks.0."
    assert info[f"{stacked}mixer.query"].axes == ("layers", "embed", "heads", "head_dim")
    assert info[f"{stacked}mixer.query"].matrix == ((1,), (2, 3))
    assert info[f"{stacked}mixer.out"].matrix == ((1, 2), (3,))
    assert info[f"{stacked}ffn.down"].shape == (2, 48, 32)
    assert {path for path, weight in info.items() if weight.role == "embedding"} == {"embedding", "head"}
    vectors = {path for path, weight in info.items() if weight.matrix is None}
    assert vectors == {path for path in info if path.endswith(("scale", "bias"))}


@pytest.mark.xdist_group("mesh")
def test_one_seed_gives_one_set_of_weights_on_any_mesh():
    """The random bits are the same; turning them into normals may round differently where a device's share has another shape."""
    model = tiny.model()
    made = {}
    for count in (1, 8):
        mesh = build_mesh(MeshConfig(), devices=jax.devices()[:count])
        with jax.set_mesh(mesh):
            weights = jax.jit(model.init, out_shardings=model.shardings(mesh))(jax.random.key(7))
        made[count] = flatten(weights)
    for path, value in made[8].items():
        np.testing.assert_allclose(value, made[1][path], rtol=0, atol=1e-7, err_msg=path)
    query = np.asarray(made[1]["stacks.0.blocks.0.mixer.query"])
    assert np.abs(query[0] - query[1]).max() > 0, "layers must not start alike"
    # Normal, cut at two deviations, of variance 1 / fan-in.
    assert query.std() == pytest.approx(32**-0.5, rel=0.05)
    assert np.abs(query).max() < 2.3 * 32**-0.5


@pytest.mark.xdist_group("mesh")
def test_a_weights_hash_is_of_the_values_wherever_they_live():
    model = tiny.model()
    weights = tiny.weights(model)
    mixed = build_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    one = build_mesh(MeshConfig(), devices=jax.devices()[:1])
    expected = weights_hash(weights, one)
    assert weights_hash(jax.device_put(weights, model.shardings(mixed)), mixed) == expected
    assert weights_hash(weights | {"embedding": weights["embedding"][::-1]}, one) != expected
    assert weights_hash(tiny.weights(model, seed=2), one) != expected


@pytest.mark.xdist_group("mesh")
def test_shapes_and_places_are_listed_by_path():
    model = tiny.model()
    mesh = build_mesh(MeshConfig(fsdp=8))
    shape, sharding = sharded_shapes(model, mesh)["stacks.0.blocks.0.ffn.gate"]
    assert shape == (2, 32, 48)
    assert sharding.shard_shape(shape) == (2, 4, 48)
