"""The kernels in programs that the TPU's own compiler made, without a TPU; in a process of its own, which JAX starts in afresh."""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, re, jax
from tiny import run
from telamon.config.schema import MeshConfig
from telamon.kernels.attention.pick import noted
from telamon.plan.topology import aot_devices, parse_topology
from telamon.train.job import make_job

config = run(compute_dtype="bfloat16", batch_size=4).model_copy(update={"mesh": MeshConfig(fsdp=2, tensor=2)})
job = make_job(config, devices=aot_devices(parse_topology("v5e:2x2")))
with jax.sharding.use_abstract_mesh(job.mesh.abstract_mesh), noted() as picks:
    text = job.lowered("train", 4).compile().as_text()
calls = re.findall(r'%([\\w.-]+) = [^\\n]*custom_call_target="tpu_custom_call"', text)
print(json.dumps({"calls": calls, "picks": [str(pick) for pick in picks]}))
"""


@pytest.fixture(scope="module")
def compiled() -> dict[str, list[str]]:
    """Names of the kernel calls in the train step of a tiny model on four chips, and which paths were picked."""
    folder = os.path.dirname(os.path.dirname(__file__))
    options = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "XLA_FLAGS": ""}
    environment = os.environ | options | {"PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_tpu_trains_with_the_splash_kernel(compiled: dict[str, list[str]]):
    assert "attention: splash" in compiled["picks"]
    for kernel in ("splash_mha_fwd_segmented", "splash_mha_dkv_segmented"):
        assert any(kernel in call for call in compiled["calls"]), compiled


def test_a_tpu_trains_with_tokamax_cross_entropy(compiled: dict[str, list[str]]):
    assert "loss: tokamax" in compiled["picks"]
    for kernel in ("lce_fwd", "lce_bwd"):
        assert any(kernel in call for call in compiled["calls"]), compiled
