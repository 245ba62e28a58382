"""P2: from the start of a command line to the end of its first step, cold and warm; and how fast help answers."""

import os
import subprocess
import sys
import tempfile
import time
from statistics import median

from benchmarks import maxtext, peers
from benchmarks.processes import Program, seconds_to_first_step
from benchmarks.results import Result, versions_here

ROUNDS = 5
SIZES = (
    "base_emb_dim=32",
    "base_num_query_heads=4",
    "base_num_kv_heads=2",
    "head_dim=8",
    "base_mlp_dim=64",
    "base_num_decoder_layers=2",
    "vocab_size=512",
    "logits_via_embedding=true",
    "max_target_length=64",
    "per_device_batch_size=8",
)
"""The sizes of Telamon's run `tiny`."""


def run(rounds: int) -> Result:
    """Each round: both sides with empty caches, then again with the caches that this left."""
    taken: dict[str, list[float]] = {"Telamon cold": [], "MaxText cold": [], "Telamon warm": [], "MaxText warm": [], "telamon --help": []}
    peers.python_of(peers.MAXTEXT)
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            for state in ("cold", "warm"):
                taken[f"Telamon {state}"].append(seconds_to_first_step(_telamon(folder)))
                taken[f"MaxText {state}"].append(
                    seconds_to_first_step(maxtext.program("MaxText", SIZES, output=f"{folder}/maxtext", steps=5))
                )
        taken["telamon --help"].append(_help())
        print(f"  round {number + 1}/{rounds}  " + ", ".join(f"{name} {seconds[-1]:.2f} s" for name, seconds in taken.items()), flush=True)
    return _result(taken)


def _telamon(folder: str) -> Program:
    arguments = ["tiny", f"run.root={folder}/runs", f"run.compile_cache={folder}/programs", f"data.cache_dir={folder}/data"]
    return Program("Telamon", [sys.executable, "-m", "telamon", "train", *arguments], r"^step 1/")


def _help() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "telamon", "--help"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def _result(taken: dict[str, list[float]]) -> Result:
    middle = {name: median(seconds) for name, seconds in taken.items()}

    def share(state: str) -> float:
        pairs = zip(taken[f"Telamon {state}"], taken[f"MaxText {state}"], strict=True)
        return median(ours / theirs for ours, theirs in pairs)

    figures = {
        "telamon_cold_seconds": middle["Telamon cold"],
        "maxtext_cold_seconds": middle["MaxText cold"],
        "telamon_warm_seconds": middle["Telamon warm"],
        "maxtext_warm_seconds": middle["MaxText warm"],
        "share_of_maxtext_cold": share("cold"),
        "share_of_maxtext_warm": share("warm"),
        "help_seconds": middle["telamon --help"],
    }
    return Result(
        id="P2",
        title="seconds from a command line's start to the end of its first step, against MaxText",
        columns=("command", "median s", "least s", "most s"),
        rows=[[name, f"{median(s):.2f}", f"{min(s):.2f}", f"{max(s):.2f}"] for name, s in taken.items()],
        figures={name: round(value, 3) for name, value in figures.items()},
        target="cold at most a third of MaxText's; telamon --help under 0.7 s",
        holds=figures["share_of_maxtext_cold"] <= 1 / 3 and figures["help_seconds"] < 0.7,
        commands={"Telamon": "telamon train tiny", "MaxText": maxtext.shown(SIZES)},
        versions={"Telamon": versions_here("jax", "jaxlib"), "MaxText": peers.versions_of(peers.MAXTEXT)},
        threads=f"each side has the machine's {len(os.sched_getaffinity(0))} cores to itself",
        notes=[
            "The model: 2 layers, D 32, 4 heads of 8 (2 kv), F 64, V 512, T 64, batch 8, synthetic data on both sides.",
            "Cold: caches of compiled programs, tokenizers and tokens are empty (Python's own .pyc files and the system's file cache are not). "
            "Warm: the same command again with the caches that the cold one left.",
            f"{len(taken['Telamon cold'])} rounds, sides in turns; shares are medians of the shares within a round.",
        ],
    )
