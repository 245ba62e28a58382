"""A step compiled for a machine that is not there: its file is written, refused here, and what is to wait in the host's memory does."""

import math
from importlib.util import find_spec

import jax
import pytest
import tiny

from telamon.config.schema import OptimizerConfig
from telamon.errors import ConfigError
from telamon.plan.aot import compile_program
from telamon.plan.saved import load_programs
from telamon.plan.topology import parse_topology
from telamon.train.job import make_job


@pytest.mark.xdist_group("aot")
@pytest.mark.parametrize(
    ("module", "name", "kind"), [("libtpu", "v5e:2x2", "TPU v5 lite"), ("jax_plugins.xla_cuda13", "h100:4", "NVIDIA H100 80GB HBM3")]
)
def test_a_step_for_absent_devices_is_written_with_its_moments_on_the_host_and_refused_here(module, name, kind, tmp_path):
    if not (find_spec(module.partition(".")[0]) and find_spec(module)):
        pytest.skip(f"{module} is not installed")
    sizes = {"d_model": 512, "d_ff": 512, "vocab_size": 256}
    optimizer = OptimizerConfig(offload=True)
    run = tiny.run(model=sizes, optimizer=optimizer, remat="offload", batch_size=4, seq_len=128, attention="chunked")
    compiled = compile_program(run, parse_topology(name), save=tmp_path / "step", progress=False)

    job = make_job(run, devices=jax.devices()[:4])
    shards = [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(job.abstract_state.optimizer) if leaf.ndim]
    moments = sum(4 * math.prod(shape) for shape in shards)
    assert compiled.host_bytes >= moments
    assert compiled.argument_bytes < 0.7 * moments  # weights, which are half as large, and the batch

    with pytest.raises(ConfigError, match=f"devices, kind: {kind} in the file, cpu in this run"):
        load_programs(job, tmp_path / "step")
