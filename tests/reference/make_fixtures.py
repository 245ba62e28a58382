"""Make the reference fixtures: tiny random models of transformers, with what they answer.

Runs in an environment of its own, of which the package knows nothing:

    python3.11 -m venv ENV && ENV/bin/pip install torch==2.13.0 transformers==5.12.1 safetensors numpy
    ENV/bin/python tests/reference/make_fixtures.py [NAME...]

Without names all fixtures are made. A fixture in which some mistake could go unseen is refused: see `fixture_controls.py`.
"""
# pyright: reportMissingImports=false

import copy
import json
import platform
import re
import shutil
import sys
import tempfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from fixture_controls import SEEN, difference, moves_without, rounding, smallest_swap
from fixture_outputs import Arrays, decode, forward_outputs, gradients, token_rows
from fixture_variants import VARIANTS, Variant
from safetensors.torch import save_file

GAIN = 0.7
"""Of every matrix, against keeping the variance: sharper attention would let rounding of far rotary angles be seen."""
FIXTURES = Path(__file__).parent / "fixtures"
VERSIONS = {
    "torch": torch.__version__,
    "transformers": transformers.__version__,
    "numpy": np.__version__,
    "python": platform.python_version(),
}


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in names or VARIANTS:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / name
            folder.mkdir()
            meta = make(VARIANTS[name], folder)
            shutil.rmtree(FIXTURES / name, ignore_errors=True)
            shutil.copytree(folder, FIXTURES / name)
        size = sum(file.stat().st_size for file in (FIXTURES / name).iterdir())
        print(f"{name:28} {size / 1e3:6.0f} kB  {_summary(meta['controls'])}", flush=True)


def _summary(controls: dict[str, Any]) -> str:
    if not controls:
        return "respelt"
    without = [f"{found['move']:.2g}" for found in controls["without"]]
    rounding = ", ".join(f"{name} {move:.1e}" for name, move in controls["rounding"].items())
    return f"swap {controls['swap']['smallest_move']:.2g}; without {without}; rounding: {rounding}"


def make(variant: Variant, folder: Path) -> dict[str, Any]:
    """Write one fixture into an empty folder; gives its meta.json."""
    meta = {"name": variant.name, "exercises": variant.exercises, "versions": VERSIONS, "jump_mask": "by row index"}
    meta |= {"rope_on_sliding_layers": "plain"} if variant.plain_rope_on_sliding_layers else {}
    meta |= _respelt(variant, folder) if variant.spelling else _computed(variant, folder)
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
    return meta


def _computed(variant: Variant, folder: Path) -> dict[str, Any]:
    seed = zlib.crc32((variant.weights_of or variant.name).encode()) % 2**31
    torch.manual_seed(seed)
    model = build(variant)
    randomize(model, variant)
    names = _file_names(model, variant)
    rows = token_rows(model, variant)
    right = forward_outputs(model, rows)
    answers = {**rows, **right, **gradients(model, rows["ids"], names), **decode(model)}
    np.savez_compressed(folder / "expected.npz", allow_pickle=False, **answers)
    save(model, variant, folder)
    _check_reload(variant, folder, rows, right)

    def without(change: dict[str, Any], **otherwise: Any) -> Any:
        other = build(replace(variant, **otherwise), change)
        other.load_state_dict(model.state_dict())
        return other

    controls = {"swap": smallest_swap(model, rows, names), "without": moves_without(without, rows, right, variant.without)}
    same_as = {}
    if variant.plain_rope_on_sliding_layers:
        scaled = forward_outputs(without({}, plain_rope_on_sliding_layers=False), rows)
        assert difference(scaled["logits"], right["logits"]) > SEEN
        same_as = {"model.safetensors": variant.weights_of}
        (folder / "model.safetensors").unlink()
    return {
        "seed": seed,
        "weights_dtype": variant.dtype,
        "same_as": same_as,
        "controls": {**controls, "rounding": rounding(model, rows, right)},
    }


def _respelt(variant: Variant, folder: Path) -> dict[str, Any]:
    """Only config.json is new; the rest is another fixture's."""
    other = FIXTURES / str(variant.weights_of)
    assert variant.spelling is not None
    config = variant.spelling(json.loads((other / "config.json").read_text()))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    with np.load(other / "expected.npz") as arrays:
        expected = dict(arrays)
    shutil.copy(other / "model.safetensors", folder)
    _check_reload(variant, folder, expected, expected)
    (folder / "model.safetensors").unlink()
    return {"same_as": {file: variant.weights_of for file in ("model.safetensors", "expected.npz")}, "controls": {}}


def build(variant: Variant, change: dict[str, Any] | None = None) -> Any:
    """The variant's model with fresh weights, in eager attention."""
    config = getattr(transformers, variant.config)(**json.loads(json.dumps({**variant.options, **(change or {})})))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    return prepare(model, variant)


def prepare(model: Any, variant: Variant) -> Any:
    """Ready to answer: no dropout, no end of generation, and the rope of the variant."""
    model.eval()
    assert model.config._attn_implementation == "eager"
    if variant.plain_rope_on_sliding_layers:
        _unscale_sliding_layers(model.model)
    return model


def _unscale_sliding_layers(decoder: Any) -> None:
    """Hand the sliding layers the rope of the same theta without scaling."""
    config = copy.deepcopy(decoder.config)
    config.rope_parameters = {"rope_type": "default", "rope_theta": config.rope_parameters["rope_theta"]}
    decoder.plain_rotary_emb = type(decoder.rotary_emb)(config)

    def unscale(layer: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return args, {**kwargs, "position_embeddings": decoder.plain_rotary_emb(args[0], kwargs["position_ids"])}

    for layer, kind in zip(decoder.layers, config.layer_types, strict=True):
        if kind == "sliding_attention":
            layer.register_forward_pre_hook(unscale, with_kwargs=True)


@torch.no_grad()
def randomize(model: Any, variant: Variant) -> None:
    """Noise on every parameter; norm scales and biases keep it around what they were initialised to.

    Scales of query norms lie half a unit lower, which blunts the attention as `GAIN` does where there are none.
    """
    for name, parameter in model.named_parameters():
        spread = _spread(name, parameter, variant)
        value = spread * torch.randn_like(parameter) + (parameter if parameter.ndim == 1 else 0) - (0.5 if "q_norm" in name else 0)
        parameter.copy_(value.to(getattr(torch, variant.dtype)))


def _spread(name: str, parameter: Any, variant: Variant) -> float:
    if parameter.ndim == 1:
        return 0.15 if name.endswith("bias") else 0.4
    branch = re.search("o_proj|down_proj|c_proj", name) is not None
    return GAIN * (variant.branch_gain if branch else 1) * parameter.shape[-1] ** -0.5


def _file_names(model: Any, variant: Variant) -> dict[str, str]:
    """Names in the file by names in memory, of what takes part in text."""
    text = [name for name, _ in model.named_parameters() if name.startswith(variant.text_prefix)]
    return {name: variant.file_prefix + name.removeprefix(variant.text_prefix) for name in text}


def save(model: Any, variant: Variant, folder: Path) -> None:
    """Config and weights as `save_pretrained` writes them, in the dtype of the variant."""
    dtype = getattr(torch, variant.dtype)
    stored = {name: value.to(dtype) for name, value in model.state_dict().items()}
    model.config.dtype = dtype
    total = sum(value.nbytes for value in stored.values())
    limit = total if variant.shards == 1 else int(total / (variant.shards - 0.5))
    model.save_pretrained(folder, state_dict=stored, max_shard_size=limit)
    assert len(list(folder.glob("*.safetensors"))) == variant.shards
    if variant.text_prefix and variant.text_prefix == variant.file_prefix:
        save_file({name: stored[name] for name, _ in model.named_parameters()}, folder / "model.safetensors", metadata={"format": "pt"})


def _check_reload(variant: Variant, folder: Path, rows: Arrays, right: Arrays) -> None:
    """The folder alone gives the same logits, with no tensor missing or left over."""
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not any(found.values()), found
    move = difference(forward_outputs(prepare(model, variant), rows)["logits"], right["logits"])
    assert move == 0, f"reading {variant.name} back moves logits by {move}"


if __name__ == "__main__":
    main(sys.argv[1:])
