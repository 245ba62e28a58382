from typing import Any

import jax
import jax.numpy as jnp
import pytest
import tiny
from jax.sharding import AbstractMesh, PartitionSpec

from telamon.config.schema import AXES, MeshConfig
from telamon.errors import ConfigError
from telamon.models.weights import flatten, sharded_shapes
from telamon.parallel import rules
from telamon.parallel.mesh import build_mesh
from telamon.parallel.rules import (
    ACTIVATION_RULES,
    WEIGHT_RULES,
    batch_sharding,
    check_sharded,
    constrain,
    spec,
    table,
    weight_partition,
    weight_sharding,
)

pytestmark = pytest.mark.xdist_group("mesh")


def abstract_mesh(sizes: dict[str, int]) -> AbstractMesh:
    return AbstractMesh(tuple(sizes.get(axis, 1) for axis in AXES), AXES)


@pytest.fixture(scope="module")
def mixed() -> Any:
    return build_mesh(MeshConfig(data=2, fsdp=2, tensor=2))


def test_logical_names_become_mesh_axes():
    assert spec(("layers", "embed", "heads", "head_dim"), WEIGHT_RULES) == PartitionSpec("stage", "fsdp", "tensor", None)
    assert spec(("batch", "seq", "embed"), ACTIVATION_RULES) == PartitionSpec(("data", "fsdp", "expert"), "context", None)
    assert spec(("embed", None), WEIGHT_RULES) == PartitionSpec("fsdp", None)
    with pytest.raises(KeyError, match="heds"):
        spec(("heds",), WEIGHT_RULES)


def test_every_logical_name_of_the_model_has_a_rule():
    names = {axis for family in ("llama", "qwen3") for weight in flatten(tiny.model(family).info).values() for axis in weight.axes}
    assert names <= set(WEIGHT_RULES)


def test_a_dim_that_does_not_divide_stays_whole(mixed: Any):
    assert weight_sharding(mixed, ("embed", "heads", "head_dim"), (32, 4, 8)).spec == PartitionSpec("fsdp", "tensor", None)
    assert weight_sharding(mixed, ("embed", "heads", "head_dim"), (32, 3, 8)).spec == PartitionSpec("fsdp", None, None)
    assert weight_sharding(mixed, ("vocab", "embed"), (11, 7)).spec == PartitionSpec(None, None)


def test_an_axis_that_stores_weights_takes_the_largest_dim_that_it_divides():
    """GPT-OSS is 2,880 wide, which 64 divides and 128 does not."""
    wide, wider, both = (abstract_mesh(sizes) for sizes in ({"fsdp": 64}, {"fsdp": 128}, {"fsdp": 128, "tensor": 2}))
    gate, head = (("layers", "experts", "embed", "mlp"), (128, 128, 2880, 2880)), (("embed", "vocab"), (2880, 201088))
    assert weight_partition(wide, *gate) == PartitionSpec("stage", "expert", "fsdp", "tensor")
    assert weight_partition(wider, *gate) == PartitionSpec("stage", "fsdp", None, "tensor"), "not the layers"
    assert weight_partition(wider, *head) == PartitionSpec(None, "fsdp")
    assert weight_partition(both, *head) == PartitionSpec(None, "tensor"), "not one that is split already"
    assert weight_partition(wider, ("embed", "heads", "head_dim"), (2880, 64, 64)) == PartitionSpec(None, "tensor", None)
    assert weight_partition(abstract_mesh({"fsdp": 8}), ("embed", "mlp"), (36, 48)) == PartitionSpec(None, "fsdp")
    assert weight_partition(abstract_mesh({"tensor": 8}), ("embed", "mlp"), (48, 36)) == PartitionSpec("fsdp", None), "tensor stays away"


def test_what_fsdp_does_not_split_counts_as_whole_though_another_axis_splits_it():
    mesh = build_mesh(MeshConfig(expert=2, fsdp=4))
    gate = {"gate": ((8, 18, 30), weight_sharding(mesh, ("experts", "embed", "mlp"), (8, 18, 30)))}
    with pytest.raises(ConfigError, match=r"^100\.0% .*mesh.fsdp=2 divide a dim"):
        check_sharded(mesh, shapes=gate, limit=0.02)
    alone = build_mesh(MeshConfig(expert=8, fsdp=1))
    check_sharded(alone, shapes={"query": ((18, 30), weight_sharding(alone, ("embed", "heads"), (18, 30)))}, limit=0.02)


def test_rows_are_split_over_data_fsdp_and_expert(mixed: Any):
    assert batch_sharding(mixed).shard_shape((8, 16)) == (2, 16)
    assert batch_sharding(build_mesh(MeshConfig(expert=4, fsdp=1, data=2))).shard_shape((8, 16)) == (1, 16)


def test_activations_are_pinned_inside_a_mesh_and_free_outside(mixed: Any):
    x = jnp.zeros((8, 16, 32))
    pinned = jax.jit(lambda x: constrain(x + 1, "batch", "seq", "embed"))
    assert len(pinned(x).devices()) == 1
    with jax.set_mesh(mixed):
        assert pinned(x).sharding.shard_shape(x.shape) == (2, 16, 32)


@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"fsdp": 4, "tensor": 2}, {"data": 8, "fsdp": 1}], ids=str)
def test_layouts_that_split_nearly_everything_pass(sizes: dict[str, Any]):
    mesh = build_mesh(MeshConfig(**sizes))
    check_sharded(mesh, shapes=sharded_shapes(tiny.model(), mesh), limit=0.02)


def test_a_layout_that_leaves_much_whole_is_refused():
    """Sizes that 8 does not divide leave every matrix whole on each device, and the run would only look distributed."""
    mesh = build_mesh(MeshConfig(fsdp=8))
    model = tiny.model(**tiny.INDIVISIBLE)
    with pytest.raises(ConfigError, match=r"100\.0% of the parameters would stay unsharded .*'fsdp': 8.*replicated_limit=2\.0%") as error:
        check_sharded(mesh, shapes=sharded_shapes(model, mesh), limit=0.02)
    assert "ffn.gate (2, 36, 44)" in str(error.value)
    assert "mesh.fsdp=2, 4 divide a dim of the first" in str(error.value)
    assert error.value.exit_code == 2
    check_sharded(mesh, shapes=sharded_shapes(model, mesh), limit=1.0)


def test_the_share_left_whole_is_counted_in_values(mixed: Any):
    """128 of 1,152 values stay whole: 11.1 %."""
    shapes = {
        "split": ((32, 32), weight_sharding(mixed, ("embed", "mlp"), (32, 32))),
        "whole": ((128,), weight_sharding(mixed, ("norm",), (128,))),
    }
    check_sharded(mixed, shapes=shapes, limit=0.12)
    with pytest.raises(ConfigError, match=r"^11\.1% .*whole \(128,\)"):
        check_sharded(mixed, shapes=shapes, limit=0.11)


def test_rules_print_as_a_table():
    lines = table(ACTIVATION_RULES).splitlines()
    assert "batch      data x fsdp x expert" in lines
    assert "head_dim   whole" in lines
    assert len(lines) == len(rules.ACTIVATION_RULES)
    assert "embed      fsdp, or the largest other dim that it divides" in table(WEIGHT_RULES).splitlines()
