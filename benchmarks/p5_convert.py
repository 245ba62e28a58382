"""P5: a model from Hugging Face's format into a run and back: time against two plain copies of its file, and peak memory."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.processes import BenchmarkError
from benchmarks.results import Result, versions_here

ROUNDS = 5
BOUND = 4.0
TENSORS = 3

LARGE = {
    "hidden_size": 2048,
    "intermediate_size": 3200,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32768,
    "num_hidden_layers": 16,
}
TINY = LARGE | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 256,
}
COPY, THERE, BACK = "two copies with fsync", "telamon import", "telamon export"
WEIGHTS = "model.safetensors"


def run(rounds: int) -> Result:
    """Copies and conversions in turns; the memory beyond that of converting a model of next to nothing."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny, model = folder / "tiny", folder / "model"
        _make_model(tiny, TINY)
        largest, size = _make_model(model, LARGE)
        starts = {side: figures for side, figures in zip((THERE, BACK), _there_and_back(tiny, folder), strict=True)}
        seconds: dict[str, list[float]] = {COPY: [], THERE: [], BACK: []}
        peaks: dict[str, list[int]] = {THERE: [], BACK: []}
        for number in range(rounds):
            for side in ("copy", "convert") if number % 2 else ("convert", "copy"):
                if side == "copy":
                    seconds[COPY].append(_copy_twice(model / WEIGHTS, folder))
                    continue
                for command, (took, peak) in zip((THERE, BACK), _there_and_back(model, folder), strict=True):
                    seconds[command].append(took)
                    peaks[command].append(peak)
            print(
                f"  round {number + 1}/{rounds}  " + ", ".join(f"{side} {taken[-1]:.2f} s" for side, taken in seconds.items()), flush=True
            )
    return _result(seconds, peaks, starts, largest, size)


def _make_model(folder: Path, sizes: dict[str, int]) -> tuple[int, int]:
    """A Llama in bfloat16 with random weights; bytes of its largest tensor and of its file.

    Written piece by piece: a child's peak memory, as the system counts it, includes that of the process that started it.
    """
    D, F, KV = sizes["hidden_size"], sizes["intermediate_size"], sizes["num_key_value_heads"] * sizes["head_dim"]
    block = {
        "input_layernorm": (D,),
        "self_attn.q_proj": (D, D),
        "self_attn.k_proj": (KV, D),
        "self_attn.v_proj": (KV, D),
        "self_attn.o_proj": (D, D),
        "post_attention_layernorm": (D,),
        "mlp.gate_proj": (F, D),
        "mlp.up_proj": (F, D),
        "mlp.down_proj": (D, F),
    }
    shapes = {"model.embed_tokens.weight": (sizes["vocab_size"], D), "model.norm.weight": (D,)}
    shapes |= {f"model.layers.{layer}.{name}.weight": shape for layer in range(sizes["num_hidden_layers"]) for name, shape in block.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    folder.mkdir()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(0)
    with (folder / WEIGHTS).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for at in range(0, end, 1 << 20):
            file.write(rng.integers(0, 0x3F80, min(end - at, 1 << 20) // 2, np.uint16).tobytes())  # bfloat16 from 0 to 1
    settings = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        **sizes,
    }
    settings |= {
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(settings | {"torch_dtype": "bfloat16"}))
    return max(2 * int(np.prod(shape)) for shape in shapes.values()), end


def _there_and_back(model: Path, folder: Path) -> list[tuple[float, int]]:
    """(seconds, peak bytes) of an import of `model` and of the export of what it made, which must hold the same tensors."""
    run, back = folder / "run", folder / "back"
    done = [_run("import", str(model), str(run)), _run("export", str(run), str(back))]
    _check_same(model / WEIGHTS, back / WEIGHTS)
    shutil.rmtree(run)
    shutil.rmtree(back)
    return done


def _run(*arguments: str) -> tuple[float, int]:
    with tempfile.TemporaryFile() as output:
        began = time.perf_counter()
        child = subprocess.Popen([sys.executable, "-m", "telamon", *arguments], stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(child.pid, 0)
        took = time.perf_counter() - began
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            output.seek(0)
            raise BenchmarkError(
                f"telamon {' '.join(arguments)} ended with exit code {child.returncode}:\n{output.read().decode()[-2000:]}"
            )
    return took, usage.ru_maxrss * 1024


def _copy_twice(file: Path, folder: Path) -> float:
    """Seconds for a copy and a copy of the copy, each put on disk."""
    first, second = folder / "first", folder / "second"
    began = time.perf_counter()
    for source, copy in ((file, first), (first, second)):
        shutil.copyfile(source, copy)
        with copy.open("rb+") as written:
            os.fsync(written.fileno())
    took = time.perf_counter() - began
    first.unlink()
    second.unlink()
    return took


def _check_same(left: Path, right: Path) -> None:
    """Both files hold the same tensors, to the bit."""
    (headers, starts), files = zip(*map(_header, (left, right)), strict=True), (left.open("rb"), right.open("rb"))
    with files[0], files[1]:
        for name in headers[0] | headers[1]:
            entries = [header[name] for header in headers]
            for file, entry, start in zip(files, entries, starts, strict=True):
                file.seek(start + entry["data_offsets"][0])
            rest = entries[0]["data_offsets"][1] - entries[0]["data_offsets"][0]
            same = entries[0]["dtype"] == entries[1]["dtype"] and entries[0]["shape"] == entries[1]["shape"]
            while same and rest:
                pieces = [file.read(min(rest, 1 << 20)) for file in files]
                same, rest = pieces[0] == pieces[1], rest - len(pieces[0])
            if not same:
                raise BenchmarkError(f"{name} came back changed")


def _header(path: Path) -> tuple[dict, int]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header, 8 + length


def _result(
    seconds: dict[str, list[float]], peaks: dict[str, list[int]], starts: dict[str, tuple[float, int]], largest: int, size: int
) -> Result:
    times = median((there + back) / copies for copies, there, back in zip(*seconds.values(), strict=True))
    beyond = {command: (max(peaks[command]) - starts[command][1]) / largest for command in peaks}
    rows = [
        [
            side,
            *(f"{f(taken):.2f}" for f in (median, min, max)),
            f"{starts[side][0]:.2f}" if side in starts else "",
            f"{max(peaks[side]) / 1e6:,.0f}" if side in peaks else "",
            f"{starts[side][1] / 1e6:,.0f}" if side in starts else "",
        ]
        for side, taken in seconds.items()
    ]
    return Result(
        id="P5",
        title="a model from Hugging Face's format into a run and back, against plain copies",
        columns=("side", "median s", "least", "most", "of it, start s", "peak MB", "of it, process MB"),
        rows=rows,
        figures={
            "times_two_copies": round(times, 3),
            "copies_seconds": round(median(seconds[COPY]), 3),
            "import_seconds": round(median(seconds[THERE]), 3),
            "export_seconds": round(median(seconds[BACK]), 3),
            "import_peak_in_largest_tensors": round(beyond[THERE], 3),
            "export_peak_in_largest_tensors": round(beyond[BACK], 3),
        },
        target=f"at most {BOUND:.0f} × the two copies; peak memory at most the process's own + {TENSORS} × the largest tensor",
        holds=times <= BOUND and max(beyond.values()) <= TENSORS,
        commands={THERE: "telamon import MODEL RUN", BACK: "telamon export RUN MODEL"},
        versions={"both": versions_here("jax", "orbax-checkpoint", "tensorstore", "numpy")},
        threads=f"the machine's {len(os.sched_getaffinity(0))} cores",
        notes=[
            f"A Llama of {LARGE['num_hidden_layers']} layers in bfloat16, {size / 1e9:.2f} GB in one safetensors file, its largest tensor {largest / 1e6:.0f} MB; "
            "what comes back holds the same tensors to the bit.",
            "Times are those of whole commands, from their start to their end, with every file on disk and its checksum taken, and "
            "(export) every byte of the checkpoint checked before. The copies: a copy of the file and a copy of the copy, each with fsync. "
            "All read from the page cache what was written just before.",
            "A process's own time and memory are those of converting a model of the same depth with 1 MB of weights. Memory is the peak resident "
            "set that the system counts for the process.",
            f"{len(seconds[COPY])} rounds in turns; the ratio is the median of the ratios within a round, the peak the highest of all rounds.",
        ],
    )
