"""P6: tokens a second of generation with a model of SmolLM2-135M's size, against transformers and vLLM, all on this machine's cores."""

import os
import sys
from statistics import median

from benchmarks import peers
from benchmarks.processes import BenchmarkError, Program, take_turns
from benchmarks.results import Result, versions_here

ROUNDS = 5
TOKENS = 128
"""Tokens that each row of a batch gets."""

BATCHES = (1, 16)
VARIANTS = {
    f"transformers {dtype} {attention}": ("--dtype", dtype, "--attention", attention)
    for dtype in ("float32", "bfloat16")
    for attention in ("sdpa", "eager")
}
OURS, OURS_FP32, VLLM = "Telamon bfloat16", "Telamon float32", "vLLM bfloat16"
STEP = r"^step \d+"


def run(rounds: int) -> Result:
    """At each size of batch: all of transformers' variants in a trial, then its best, vLLM and Telamon in turns."""
    vllm, missing = _vllm()
    tried: dict[int, dict[str, float]] = {}
    seconds: dict[int, dict[str, list[float]]] = {}
    best: dict[int, str] = {}
    for batch in BATCHES:
        print(f"batch {batch}", flush=True)
        tried[batch] = {}
        for name in VARIANTS:  # one after the other: all at once would not fit every machine's memory
            tried[batch] |= {
                name: min(taken)
                for name, taken in take_turns([_torch(name, batch)], rounds=min(2, rounds), steps={name: 1}, warmup=1).items()
            }
        best[batch] = min(tried[batch], key=tried[batch].__getitem__)
        programs = [_telamon(OURS, batch), _torch(best[batch], batch), _telamon(OURS_FP32, batch), *vllm(batch)]
        seconds[batch] = take_turns(programs, rounds=rounds, steps={program.name: 1 for program in programs})
    return _result(seconds, tried, best, missing)


def _telamon(name: str, batch: int) -> Program:
    arguments = ["--batch", str(batch), "--dtype", name.split()[1]]
    return Program(name, [sys.executable, "-m", "benchmarks.generate_telamon", *arguments], STEP)


def _torch(name: str, batch: int) -> Program:
    script = str(peers.ROOT / "benchmarks" / "generate_torch.py")
    return Program(name, [peers.python_of(peers.TORCH), script, "--batch", str(batch), *VARIANTS[name]], STEP)


def _vllm():
    """Makes the list of vLLM's programs for a size of batch, empty where it cannot be installed; and then why."""
    try:
        python = peers.python_of(peers.VLLM)
    except BenchmarkError as error:
        return lambda batch: [], str(error).strip().splitlines()[-1]
    script = str(peers.ROOT / "benchmarks" / "generate_vllm.py")
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return lambda batch: [Program(VLLM, [python, script, "--batch", str(batch), "--dtype", "bfloat16"], STEP, env)], None


def _result(
    seconds: dict[int, dict[str, list[float]]], tried: dict[int, dict[str, float]], best: dict[int, str], missing: str | None
) -> Result:
    def over(batch: int, other: str) -> float:
        """Median over rounds of how many times as fast Telamon is."""
        return median(theirs / ours for ours, theirs in zip(seconds[batch][OURS], seconds[batch][other], strict=True))

    def row(batch: int, name: str) -> list[str]:
        rates = sorted(batch * TOKENS / taken for taken in seconds[batch][name])
        spread = f"{rates[0]:,.1f} - {rates[-1]:,.1f}"
        return [str(batch), name, f"{median(rates):,.1f}", spread, f"{over(batch, name):.2f}"]

    def rate(batch: int, name: str) -> float:
        return batch * TOKENS / median(seconds[batch][name])

    figures: dict[str, float | str | None] = {}
    for batch in BATCHES:
        figures |= {
            f"telamon_tokens_per_second_{batch}": round(rate(batch, OURS), 1),
            f"transformers_tokens_per_second_{batch}": round(rate(batch, best[batch]), 1),
            f"times_transformers_{batch}": round(over(batch, best[batch]), 3),
            f"times_vllm_{batch}": round(over(batch, VLLM), 3) if VLLM in seconds[batch] else None,
        }
    cores = len(os.sched_getaffinity(0))
    return Result(
        id="P6",
        title="tokens a second of generation, against transformers and vLLM",
        columns=("batch", "side", "tokens/s", "slowest - fastest turn", "Telamon is times as fast"),
        rows=[row(batch, name) for batch in BATCHES for name in seconds[batch]],
        figures=figures,
        target="at least 1.5 times transformers' tokens/s at batch 16",
        holds=over(16, best[16]) >= 1.5,
        commands={
            "Telamon": "python -m benchmarks.generate_telamon --batch 16 --dtype bfloat16",
            "transformers": f"python benchmarks/generate_torch.py --batch 16 {' '.join(VARIANTS[best[16]])}",
            "vLLM": "VLLM_ENABLE_V1_MULTIPROCESSING=0 python benchmarks/generate_vllm.py --batch 16 --dtype bfloat16",
        },
        versions={
            "Telamon": versions_here("jax", "jaxlib", "flax"),
            "transformers": peers.versions_of(peers.TORCH),
            **({} if missing else {"vLLM": peers.versions_of(peers.VLLM)}),
        },
        threads=f"each side has the machine's {cores} cores to itself during its turn",
        notes=[
            "SmolLM2-135M's sizes (30 layers, D 576, 9 heads of 64, 3 kv, F 1536, V 49,152, tied) with random weights; "
            f"prompts of 32 random ids, {TOKENS} tokens for each, greedy; the prompts' forward counts.",
            "Each side is a program of its own that continues one batch after the other, stopped by signal outside its turn.",
            f"{len(seconds[16][OURS])} rounds; the ratio is the median over rounds of the ratios within a round.",
            *(
                f"transformers' variants in a trial at batch {batch}, tokens/s at their best: {_shown(tried[batch], batch)}."
                for batch in BATCHES
            ),
            *([f"vLLM could not be installed here: {missing}"] if missing else []),
        ],
    )


def _shown(tried: dict[str, float], batch: int) -> str:
    return ", ".join(f"{name.removeprefix('transformers ')} {batch * TOKENS / taken:,.0f}" for name, taken in tried.items())
