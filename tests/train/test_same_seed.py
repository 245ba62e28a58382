"""One config and one seed give one run, in whatever process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
PROGRAM = """
import json, jax, tiny
from telamon.parallel.rules import batch_sharding
from telamon.train.job import make_job
from telamon.train.state import weights_hash

job = make_job(tiny.run(model={"tie_embeddings": False, "n_layers": 1}, seed=3, compute_dtype="bfloat16"), devices=jax.devices()[:1])
state, losses = job.fresh_state(), []
first = weights_hash(state.weights, job.mesh)
for step in range(3):
    batch = tiny.batch([[9, 7]] * 8, length=16, seed=step)
    state, metrics = job.train_step(8)(state, jax.device_put(batch, batch_sharding(job.mesh)))
    losses.append(float(metrics["loss"]).hex())
print(json.dumps([first, losses, weights_hash(state.weights, job.mesh)]))
"""


def _start(hash_seed: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent / "src")])}
    return subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def _result(process: subprocess.Popen[str]) -> list:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return json.loads(out)


@pytest.mark.slow
def test_fresh_processes_with_one_seed_agree_to_the_last_bit():
    """Weights at the start, a freshly made head included, three losses, and weights after them; string hashes differ on purpose."""
    one, two = map(_result, [_start("1"), _start("2")])
    assert one == two
