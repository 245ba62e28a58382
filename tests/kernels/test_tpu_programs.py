"""The kernels in programs that the TPU's own compiler made, without a TPU; in a process of its own, which JAX starts in afresh."""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, re, jax, jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from tiny import run
from telamon.config.schema import MeshConfig
from telamon.kernels.attention.pick import noted
from telamon.kernels.experts import grouped_matmul
from telamon.layers.attention import AttentionConfig
from telamon.layers.norm import NormConfig
from telamon.layers.parts import Context
from telamon.layers.rope import RopeConfig
from telamon.parallel.mesh import build_mesh
from telamon.plan.topology import aot_devices, parse_topology
from telamon.train.job import make_job

config = run(compute_dtype="bfloat16", batch_size=4).model_copy(update={"mesh": MeshConfig(fsdp=2, tensor=2)})
job = make_job(config, devices=aot_devices(parse_topology("v5e:2x2")))

def layer(attention):
    config = AttentionConfig(n_heads=8, n_kv_heads=2, **attention)
    graph, weights = nnx.split(nnx.eval_shape(lambda: config.build(d_model=256, n_layers=1, rngs=nnx.Rngs(0))))

    def loss(weights, x, places):
        ctx = Context(places, places, places, places, places)
        return jnp.sum(nnx.merge(graph, weights)(x, ctx, None)[0].astype(jnp.float32))

    def shaped(shape, dtype, *axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(job.mesh, PartitionSpec(*axes)))

    weights = jax.tree.map(lambda x: shaped(x.shape, x.dtype), weights)
    rows = shaped((4, 512), jnp.int32, "fsdp")
    return jax.jit(jax.grad(loss, (0, 1))).lower(weights, shaped((4, 512, 256), jnp.bfloat16, "fsdp"), rows)

def experts(topology):
    "Rows of each of four chips, and the matrices of experts on all of them; widths of two tiles and of three."
    mesh = build_mesh(MeshConfig(data=4), devices=aot_devices(parse_topology(topology)))
    rows, whole = PartitionSpec("data"), PartitionSpec()

    def loss(x, w, sizes):
        product = jax.shard_map(lambda x, w, sizes: grouped_matmul(x, w, sizes[0]), in_specs=(rows, whole, rows), out_specs=rows, check_vma=False)
        return jnp.sum(jnp.sin(product(x, w, sizes).astype(jnp.float32)))

    shapes = ((4000, 256), jnp.bfloat16, rows), ((8, 256, 384), jnp.float32, whole), ((4, 8), jnp.int32, rows)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        shaped = [jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, axes)) for shape, dtype, axes in shapes]
        return jax.jit(jax.grad(loss, (0, 1))).lower(*shaped)

LAYERS = {
    "train": lambda: job.lowered("train", 4),
    "gpt-oss": lambda: layer({"head_dim": 64, "sinks": True, "window": 128, "qkv_bias": True, "out_bias": True}),
    "llama4": lambda: layer({
        "head_dim": 128, "chunk": 256, "rope": RopeConfig(pairs="interleaved"), "qk_norm": NormConfig(kind="rms0"), "qk_norm_place": "after"
    }),
    "experts on v6e": lambda: experts("v6e:2x2"),
    "experts on v5p": lambda: experts("v5p:2x2x1"),
}
found = {}
for name, lowered in LAYERS.items():
    with jax.sharding.use_abstract_mesh(job.mesh.abstract_mesh), noted() as picks:
        text = lowered().compile().as_text()
    calls = re.findall(r'%([\\w.-]+) = [^\\n]*custom_call_target="tpu_custom_call"', text)
    found[name] = {"calls": calls, "picks": [str(pick) for pick in picks]}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, list[str]]]:
    """Names of the kernel calls on four chips, and which paths were picked: of a tiny model's train step, and of layers by themselves."""
    folder = os.path.dirname(os.path.dirname(__file__))
    options = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "XLA_FLAGS": ""}
    environment = os.environ | options | {"PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("program", ["train", "gpt-oss", "llama4"])
def test_a_tpu_trains_with_the_splash_kernel(compiled: dict[str, dict[str, list[str]]], program: str):
    """Sinks within a window of heads of 64, and chunks, too."""
    assert "attention: splash" in compiled[program]["picks"]
    for kernel in ("splash_mha_fwd_segmented", "splash_mha_dkv_segmented"):
        assert any(kernel in call for call in compiled[program]["calls"]), compiled


def test_a_tpu_trains_with_tokamax_cross_entropy(compiled: dict[str, dict[str, list[str]]]):
    assert "loss: tokamax" in compiled["train"]["picks"]
    for kernel in ("lce_fwd", "lce_bwd"):
        assert any(kernel in call for call in compiled["train"]["calls"]), compiled


@pytest.mark.parametrize("program", ["experts on v6e", "experts on v5p"])
def test_a_tpu_multiplies_the_rows_of_experts_with_tokamax_newer_kernels(compiled: dict[str, dict[str, list[str]]], program: str):
    """Forward, the rows' gradient (k and n the other way round) and the weights' gradient, for the 1,000 rows of one chip."""
    assert compiled[program]["picks"] == ["experts: tokamax"]
    for kernel in (
        "gmm_v2-g_8-m_1000-k_256-act_None-n_384",
        "gmm_v2-g_8-m_1000-k_384-act_None-n_256",
        "tgmm_v2-g_8-m_1008-k_256-act_None-n_384",
    ):
        assert any(call.startswith(kernel) for call in compiled[program]["calls"]), compiled
