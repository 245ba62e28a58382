"""P1: tokens a second of a training step, against MaxText and PyTorch, all on this machine's cores."""

import os
import shlex
import sys
import tempfile
from statistics import median

from benchmarks import maxtext, peers
from benchmarks.processes import Program, take_turns
from benchmarks.results import Result, versions_here

ROUNDS = 5
TOKENS = 8 * 512
"""Tokens of a step: the same for all."""

RUN = str(peers.ROOT / "benchmarks" / "runs" / "p1.yml")
SIZES = (
    "base_emb_dim=512",
    "base_num_query_heads=8",
    "base_num_kv_heads=8",
    "head_dim=64",
    "base_mlp_dim=1536",
    "base_num_decoder_layers=8",
    "vocab_size=8192",
    "logits_via_embedding=false",
    "max_target_length=512",
    "per_device_batch_size=8",
)
VARIANTS = {
    f"MaxText {dtype} {remat}": (*SIZES, f"dtype={dtype}", f"remat_policy={remat}")
    for dtype in ("float32", "bfloat16")
    for remat in ("full", "minimal")
}
OURS, OURS_FP32, TORCH = "Telamon bfloat16", "Telamon float32", "PyTorch float32"


def run(rounds: int) -> Result:
    """All variants of MaxText in a trial, then its best, PyTorch and Telamon in turns."""
    with tempfile.TemporaryDirectory() as folder:
        trial = [maxtext.program(name, settings, output=f"{folder}/{i}", steps=1000) for i, (name, settings) in enumerate(VARIANTS.items())]
        tried = {name: min(seconds) for name, seconds in take_turns(trial, rounds=2, steps=dict.fromkeys(VARIANTS, 1)).items()}
        best = min(tried, key=lambda name: tried[name])
        programs = [
            _telamon(OURS, folder, "bfloat16"),
            maxtext.program(best, VARIANTS[best], output=f"{folder}/best", steps=1000),
            Program(TORCH, [peers.python_of(peers.TORCH), str(peers.ROOT / "benchmarks" / "peer_torch.py")], r"^step \d+"),
            _telamon(OURS_FP32, folder, "float32"),
        ]
        steps = {OURS: 4, best: 2, TORCH: 2, OURS_FP32: 2}
        seconds = take_turns(programs, rounds=rounds, steps=steps, warmup=3)
    return _result(seconds, tried, best)


def _telamon(name: str, folder: str, dtype: str) -> Program:
    arguments = [RUN, f"train.compute_dtype={dtype}", f"run.root={folder}", f"run.name={dtype}"]
    return Program(name, [sys.executable, "-m", "telamon", "train", *arguments], r"^step \d+/")


def _result(seconds: dict[str, list[float]], tried: dict[str, float], best: str) -> Result:
    def over(other: str) -> float:
        """Median over rounds of how many times as fast Telamon is."""
        return median(theirs / ours for ours, theirs in zip(seconds[OURS], seconds[other], strict=True))

    def row(name: str) -> list[str]:
        taken = seconds[name]
        rates = (TOKENS / median(taken), TOKENS / max(taken), TOKENS / min(taken))
        return [name, f"{median(taken):.2f}", f"{rates[0]:,.0f}", f"{rates[1]:,.0f} - {rates[2]:,.0f}", f"{over(name):.2f}"]

    figures = {
        "telamon_tokens_per_second": TOKENS / median(seconds[OURS]),
        "maxtext_tokens_per_second": TOKENS / median(seconds[best]),
        "pytorch_tokens_per_second": TOKENS / median(seconds[TORCH]),
        "times_maxtext": over(best),
        "times_pytorch": over(TORCH),
    }
    cores = len(os.sched_getaffinity(0))
    return Result(
        id="P1",
        title="tokens a second of a training step, against MaxText and PyTorch",
        columns=("side", "s a step", "tokens/s", "slowest - fastest turn", "Telamon is times as fast"),
        rows=[row(name) for name in seconds],
        figures={name: round(value, 3) for name, value in figures.items()},
        target="at least 1.5 times MaxText's tokens/s and 1.0 times PyTorch's; stretch 2.5 and 1.5",
        holds=figures["times_maxtext"] >= 1.5 and figures["times_pytorch"] >= 1.0,
        commands={
            "Telamon": f"telamon train benchmarks/runs/p1.yml {shlex.join(['train.compute_dtype=bfloat16'])}",
            "MaxText": maxtext.shown(VARIANTS[best]),
            "PyTorch": "python benchmarks/peer_torch.py",
        },
        versions={
            "Telamon": versions_here("jax", "jaxlib", "flax", "optax"),
            "MaxText": peers.versions_of(peers.MAXTEXT),
            "PyTorch": peers.versions_of(peers.TORCH),
        },
        threads=f"each side has the machine's {cores} cores to itself during its turn",
        notes=[
            "Llama-style, 8 layers, D 512, 8 heads of 64 (8 kv), F 1536, V 8192, untied, 35.7 M parameters; T 512, batch 8; AdamW; weights in float32.",
            "Each side is its own training command, started once and stopped by signal outside its turn; time is taken between the lines it prints.",
            f"{len(seconds[OURS])} rounds; the ratio is the median over rounds of the ratios within a round.",
            "MaxText's variants in a trial, tokens/s at their best: "
            + ", ".join(f"{name.removeprefix('MaxText ')} {TOKENS / taken:,.0f}" for name, taken in tried.items())
            + f"; {best.removeprefix('MaxText ')} is compared.",
        ],
    )
