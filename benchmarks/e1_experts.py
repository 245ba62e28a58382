"""E1: a layer of experts on this machine's cores, against a dense layer of the same work; and which kernels it gets on a TPU and on a GPU."""

import json
import os
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

from benchmarks.e1_programs import RUN
from benchmarks.processes import BenchmarkError, Program, finish
from benchmarks.results import Result, versions_here

ROUNDS = 15
BATCH, LENGTH = 8, 512
"""Rows and their tokens: 4,096 tokens."""
EXPERTS, CHOSEN = 8, 2
MOST = 1.3
MACHINES = {"v6e:1x1": "TPU v6e", "h100:1": "NVIDIA H100"}
TIMEOUT = 900.0


@dataclass(frozen=True)
class Work:
    """A layer: the dense one has CHOSEN times an expert's width."""

    D: int
    F: int
    dtype: str

    def __str__(self) -> str:
        return f"D {self.D}, F {self.F}, {self.dtype}"


WORKS = (Work(512, 1024, "bfloat16"), Work(512, 1024, "float32"), Work(1024, 1024, "bfloat16"), Work(1024, 1024, "float32"))


@dataclass
class Times:
    """Seconds of each round, by the clock and of all cores together."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def run(rounds: int) -> Result:
    """The layers in turns, a work after the other, then the compilers."""
    from telamon.parallel.host_memory import keep_freed_memory

    keep_freed_memory()  # as `telamon train` does
    return result({work: layers_in_turns(work, rounds) for work in WORKS}, {machine: programs(machine) for machine in MACHINES})


def layers_in_turns(work: Work, rounds: int) -> tuple[Times, Times]:
    """Forward and backward passes of the dense layer and of the layer of experts."""
    import jax

    sides = [(_step(work, experts=experts), Times()) for experts in (False, True)]
    for step, _ in sides:
        jax.block_until_ready(step())
    for number in range(rounds):
        for step, times in sides if number % 2 else sides[::-1]:
            wall, cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(step())
            times.wall.append(time.perf_counter() - wall)
            times.cpu.append(time.process_time() - cpu)
    (_, dense), (_, experts) = sides
    print(f"  {work}: {median(experts.wall) * 1e3:.0f} ms, dense {median(dense.wall) * 1e3:.0f} ms", flush=True)
    return dense, experts


def _step(work: Work, *, experts: bool) -> Any:
    """A function without arguments: a layer's value, and its gradients of weights and input for a random gradient of the output."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    from telamon.layers.mlp import GatedMLPConfig
    from telamon.layers.moe import MoEConfig
    from telamon.layers.parts import Context
    from telamon.layers.router import RouterConfig

    mixture = MoEConfig(router=RouterConfig(n_experts=EXPERTS, top_k=CHOSEN), d_ff=work.F)
    config = mixture if experts else GatedMLPConfig(d_ff=CHOSEN * work.F)
    graph, weights = nnx.split(config.build(d_model=work.D, n_layers=1, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    x, d_out = (jnp.asarray(rng.standard_normal((BATCH, LENGTH, work.D)), work.dtype) for _ in range(2))
    ones, places = jnp.ones((BATCH, LENGTH), jnp.int32), jnp.broadcast_to(jnp.arange(LENGTH), (BATCH, LENGTH))

    @jax.jit
    def both_passes(weights: Any, x: jax.Array, d_out: jax.Array) -> Any:
        ctx = Context(ones, places, ones, places, ones)
        out, pull = jax.vjp(lambda weights, x: nnx.merge(graph, weights)(x, ctx)[0], weights, x)
        return out, pull(d_out)

    return partial(both_passes, weights, x, d_out)


def programs(machine: str) -> dict[str, Any]:
    """What a machine's compiler makes of a mixture's training step. Raises BenchmarkError where it makes nothing."""
    env = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    program = Program(machine, [sys.executable, "-m", "benchmarks.e1_programs", machine], "", env)
    done = finish(program, TIMEOUT)
    if done.code:
        raise BenchmarkError(f"compiling for {machine} ended with exit code {done.code}:\n{done.complaints[-2000:]}")
    found = json.loads(done.output.splitlines()[-1])
    print(f"  {machine}: {found}", flush=True)
    return found


def result(times: dict[Work, tuple[Times, Times]], found: dict[str, dict[str, Any]]) -> Result:
    """The table of layers; kernels are among the figures."""
    ratios = {work: (_ratio(dense.wall, experts.wall), _ratio(dense.cpu, experts.cpu)) for work, (dense, experts) in times.items()}
    first = ratios[WORKS[0]][0]
    kernels = {f"{MACHINES[machine]}: {name}": float(count) for machine, one in found.items() for name, count in one["kernels"].items()}
    grouped = {machine: sum(n for name, n in one["kernels"].items() if "gmm" in name or "ragged" in name) for machine, one in found.items()}
    return Result(
        id="E1",
        title=f"a layer of {EXPERTS} experts, {CHOSEN} a token, forward and backward on the CPU, against a dense MLP of {CHOSEN} times the width",
        columns=("layer", "dense ms", "experts ms", "of the dense time", "of its CPU time"),
        rows=[
            [
                str(work),
                f"{median(dense.wall) * 1e3:.0f}",
                f"{median(experts.wall) * 1e3:.0f}",
                f"{ratios[work][0]:.2f}",
                f"{ratios[work][1]:.2f}",
            ]
            for work, (dense, experts) in times.items()
        ],
        figures={"of_dense": round(first, 3), "of_dense_cpu_time": round(ratios[WORKS[0]][1], 3), **kernels},
        target=f"at {WORKS[0]} and {BATCH * LENGTH:,} tokens at most {MOST} × the dense layer's time; grouped matmul kernels in both compiled steps",
        holds=first <= MOST and all(grouped.values()),
        commands={
            "Telamon": "python -m benchmarks E1",
            **{name: f"python -m benchmarks.e1_programs {key}" for key, name in MACHINES.items()},
        },
        versions={"Telamon": versions_here("jax", "jaxlib", "flax", "libtpu", "tokamax")},
        threads=f"{len(os.sched_getaffinity(0))} cores for either layer",
        notes=[
            f"Both layers have the same parameters at work on a token, beside the router. The layer of experts is `telamon.layers.moe.MoE` at its "
            f"initial weights, on {BATCH} rows of {LENGTH} random tokens: router, sorting, three grouped matmuls, the weighted sum, and gradients of "
            "all weights and of the input. The dense one is `GatedMLP`. Both in one process under `jax.jit`, in turns.",
            "Times are medians; ratios are medians of the ratios within a round. CPU time is of all cores together: it is the steadier one where "
            "something else runs on the machine.",
            f"The kernels are those in the training step of `{RUN}` (two layers that are scanned, so that each call stands there once), compiled by "
            "libtpu and by XLA for GPUs, without the chips: three products forward, three for the rows' gradients, three for the weights'. "
            + "; ".join(f"{MACHINES[machine]}: {', '.join(one['picks'])}" for machine, one in found.items())
            + ".",
            "What was tried for the CPU is in [E1-tried.md](E1-tried.md).",
        ],
    )


def _ratio(dense: list[float], experts: list[float]) -> float:
    return median(ours / theirs for theirs, ours in zip(dense, experts, strict=True))
