"""P3: wall time from the start of the default training until it compresses held-out files better than gzip -9."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peers import ROOT
from benchmarks.processes import Program, Running
from benchmarks.results import FOLDER, Result, versions_here

ROUNDS = 1
"""One run takes minutes; the record compares releases."""

LIMIT = 300.0


def run(rounds: int) -> Result:
    """Set up a fresh clone for its time alone, then train with empty caches."""
    setup = _set_up()
    print(f"  set-up of a fresh clone: {setup:.0f} s (not counted below)", flush=True)
    summaries = [_train(number, rounds) for number in range(rounds)]
    return _result(summaries, setup)


def _set_up() -> float:
    """Seconds that `make setup` takes in a clone of this checkout."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "clone", "--quiet", str(ROOT), f"{folder}/telamon"], check=True)
        began = time.perf_counter()
        subprocess.run(["sh", "scripts/setup.sh"], cwd=f"{folder}/telamon", check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - began


def _train(number: int, rounds: int) -> dict[str, Any]:
    """Summary of a default run without any cache."""
    with tempfile.TemporaryDirectory() as folder:
        caches = [f"run.compile_cache={folder}/programs", f"data.cache_dir={folder}/data"]
        arguments = ["default", f"run.root={folder}/runs", "run.name=p3", *caches]
        program = Program("telamon train", [sys.executable, "-m", "telamon", "train", *arguments], "^$")
        with Running(program) as running:
            running.finish()
        summary = json.loads(Path(f"{folder}/runs/p3/summary.json").read_text())
    print(f"  run {number + 1}/{rounds}: {json.dumps(summary)}", flush=True)
    return summary


def _result(summaries: list[dict[str, Any]], setup: float) -> Result:
    reached = [s["seconds_to_beat_gzip"] for s in summaries]
    seconds = None if None in reached else median(reached)
    first = summaries[0]
    versions = versions_here("jax", "jaxlib", "tokenizers")
    records = _records(versions["telamon"], seconds, first)
    earlier = [r["seconds to beat gzip"] for r in records[:-1] if r["seconds to beat gzip"] is not None]
    falling = seconds is not None and (not earlier or seconds < earlier[-1])
    figures = {
        "seconds_to_beat_gzip": seconds,
        "val_bits_per_byte_at_end": first["val_bits_per_byte"],
        "gzip_bits_per_byte": first["gzip_bits_per_byte"],
        "run_wall_seconds": first["wall_seconds"],
        "tokens_per_second": first["tokens_per_second"],
        "setup_seconds": round(setup, 1),
        "runs": len(summaries),
    }
    return Result(
        id="P3",
        title="seconds from the start of `telamon train` to fewer bits per byte than gzip -9 on held-out files",
        columns=("run", "s to beat gzip", "bits/byte at the end", "gzip -9", "whole run, s", "tokens/s"),
        rows=[
            [
                str(i + 1),
                "not reached" if s["seconds_to_beat_gzip"] is None else f"{s['seconds_to_beat_gzip']:.0f}",
                *(f"{s[name]:.3f}" for name in ("val_bits_per_byte", "gzip_bits_per_byte")),
                f"{s['wall_seconds']:.0f}",
                f"{s['tokens_per_second']:,.0f}",
            ]
            for i, s in enumerate(summaries)
        ],
        figures=figures,
        target="under 300 s on 2 cores, and less than the release before",
        holds=seconds is not None and seconds < LIMIT and falling,
        commands={"Telamon": "telamon train default"},
        versions={"Telamon": versions},
        threads=f"the machine's {len(os.sched_getaffinity(0))} cores",
        notes=[
            "The clock starts with the process: reading, training the tokenizer, tokenising and compiling count; caches are empty. "
            "A figure is the time at which an evaluation was finished, so it is late by up to the steps between evaluations.",
            f"Setting up a fresh clone took {setup:.0f} s (packages from pip's or uv's cache where they have one) and is not counted.",
            "Held-out files are whole files, chosen by a hash of their path; gzip -9 takes them as one stream or one by one, whichever is less.",
        ],
        records=records,
    )


def _records(version: str, seconds: float | None, summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Earlier releases' entries and this one's, which replaces an older figure of its own."""
    file = FOLDER / "P3.json"
    kept = json.loads(file.read_text())["records"] if file.exists() else []
    entry = {
        "release": version,
        "date": time.strftime("%Y-%m-%d"),
        "seconds to beat gzip": seconds,
        "bits/byte at the end": summary["val_bits_per_byte"],
        "gzip bits/byte": summary["gzip_bits_per_byte"],
    }
    return [*(record for record in kept if record["release"] != version), entry]
