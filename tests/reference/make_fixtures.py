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
from fixture_controls import SEEN, difference, moves_without, rounding, router_margin, smallest_swap
from fixture_experts import BUFFERS, Piece, Unlucky, file_tensors
from fixture_mixtures import MIXTURES
from fixture_mtp import Predictor
from fixture_outputs import Arrays, counts_pads, decode, forward_outputs, gradients, token_rows
from fixture_variants import VARIANTS, Variant
from safetensors.torch import load_file, save_file

GAIN = 0.7
"""Of every matrix, against keeping the variance: sharper attention would let rounding of far rotary angles be seen."""
ROUTER_GAIN = 2.0
"""Of routers, so that few choices lie near a tie."""
ATTEMPTS = 60
"""Seeds to try where routers must not choose near a tie."""
TABLE = VARIANTS | MIXTURES
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
    for name in names or TABLE:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / name
            folder.mkdir()
            meta = make(TABLE[name], folder)
            shutil.rmtree(FIXTURES / name, ignore_errors=True)
            shutil.copytree(folder, FIXTURES / name)
        size = sum(file.stat().st_size for file in (FIXTURES / name).iterdir())
        print(f"{name:28} {size / 1e3:6.0f} kB  {_summary(meta['controls'])}", flush=True)


def _summary(controls: dict[str, Any]) -> str:
    if not controls:
        return "respelt"
    without = [f"{found['move']:.2g}" for found in controls["without"]]
    rounding = ", ".join(f"{name} {move:.1e}" for name, move in controls["rounding"].items())
    routers = f"; router {controls['router_margin']:.2g}" if "router_margin" in controls else ""
    return f"swap {controls['swap']['smallest_move']:.2g}; without {without}; rounding: {rounding}{routers}"


def make(variant: Variant, folder: Path) -> dict[str, Any]:
    """Write one fixture into an empty folder; gives its meta.json."""
    meta = {"name": variant.name, "exercises": variant.exercises, "versions": VERSIONS, "jump_mask": "by row index"}
    meta |= {"rope_on_sliding_layers": "plain"} if variant.plain_rope_on_sliding_layers else {}
    meta |= _respelt(variant, folder) if variant.spelling else _computed(variant, folder)
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
    return meta


def _computed(variant: Variant, folder: Path) -> dict[str, Any]:
    first = zlib.crc32((variant.weights_of or variant.name).encode()) % 2**31
    for seed in range(first, first + (ATTEMPTS if variant.name in MIXTURES else 1)):
        try:
            return _from_seed(variant, folder, seed)
        except Unlucky as why:
            print(f"{variant.name}: {why}; another seed", flush=True)
    raise AssertionError(f"no seed near {first} will do for {variant.name}")


def _from_seed(variant: Variant, folder: Path, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = build(variant)
    randomize(model, variant)
    tensors = file_tensors(model, variant)
    rows = token_rows(model, variant)
    margin = router_margin(model, rows)
    right = forward_outputs(model, rows)
    answers = {**rows, **right, **gradients(model, rows["ids"], tensors), **decode(model)}
    controls: dict[str, Any] = {"swap": smallest_swap(model, rows, tensors)}
    predictor = Predictor(model, lambda module: randomize(module, variant)) if variant.mtp else None
    answers |= predictor.answers(rows["ids"]) if predictor else {}
    np.savez_compressed(folder / "expected.npz", allow_pickle=False, **answers)
    save(model, variant, folder)
    _check_stored(model, tensors, folder)
    if predictor:
        _add_tensors(folder / "model.safetensors", predictor.tensors())
    _check_reload(variant, folder, rows, right)
    _name_model_type(variant, folder)

    def without(change: dict[str, Any], **otherwise: Any) -> Any:
        other = build(replace(variant, **otherwise), change)
        other.load_state_dict(model.state_dict())
        return other

    controls["without"] = moves_without(without, rows, right, variant.without)
    same_as = {}
    if variant.plain_rope_on_sliding_layers:
        scaled = forward_outputs(without({}, plain_rope_on_sliding_layers=False), rows)
        assert difference(scaled["logits"], right["logits"]) > SEEN
        same_as = {"model.safetensors": variant.weights_of}
        (folder / "model.safetensors").unlink()
    described = {"padded": "without its pads, which transformers counts in the temperature of queries"} if counts_pads(model) else {}
    described |= {"mtp": Predictor.DESCRIPTION} if predictor else {}
    controls["rounding"] = rounding(model, rows, right)
    return {
        "seed": seed,
        "weights_dtype": variant.dtype,
        **described,
        "same_as": same_as,
        "controls": controls | ({} if margin is None else {"router_margin": margin}),
    }


def _respelt(variant: Variant, folder: Path) -> dict[str, Any]:
    """Only config.json is new; the rest is another fixture's."""
    other = FIXTURES / str(variant.weights_of)
    assert variant.spelling is not None
    config = variant.spelling(json.loads((other / "config.json").read_text()))
    config["model_type"] = getattr(transformers, variant.config).model_type
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    with np.load(other / "expected.npz") as arrays:
        expected = dict(arrays)
    shutil.copy(other / "model.safetensors", folder)
    _check_reload(variant, folder, expected, expected)
    _name_model_type(variant, folder)
    if variant.file_prefix:
        return _wrapped(variant, folder, expected)
    (folder / "model.safetensors").unlink()
    return {"same_as": {file: variant.weights_of for file in ("model.safetensors", "expected.npz")}, "controls": {}}


def _wrapped(variant: Variant, folder: Path, expected: Arrays) -> dict[str, Any]:
    """The text model becomes the part of a larger one that transformers cannot make: under `text_config`, its tensors behind a prefix."""
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**variant.options, "text_config": text}, indent=2) + "\n")
    weights = {variant.file_prefix + name: tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    beside = {"vision_tower.patch_embed.proj.weight": torch.ones(3, 5), "mm_projector.proj.0.weight": torch.ones(5, 3)}
    save_file(weights | beside, folder / "model.safetensors", metadata={"format": "pt"})
    names = np.array([variant.file_prefix + name for name in expected["grad_names"]])
    np.savez_compressed(folder / "expected.npz", allow_pickle=False, **{**expected, "grad_names": names})
    return {"same_as": {}, "controls": {}}


def build(variant: Variant, change: dict[str, Any] | None = None) -> Any:
    """The variant's model with fresh weights, in eager attention."""
    config = getattr(transformers, variant.config)(**json.loads(json.dumps({**variant.options, **(change or {})})))
    how = {"attn_implementation": "eager", "dtype": torch.float32}
    model_class = getattr(transformers, variant.model)
    model = model_class.from_config(config, **how) if variant.model.startswith("Auto") else model_class._from_config(config, **how)
    return prepare(model, variant)


def prepare(model: Any, variant: Variant) -> Any:
    """Ready to answer: no dropout, no end of generation, and the rope of the variant."""
    model.eval()
    assert model.config._attn_implementation == "eager"
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    for module in model.modules():
        if type(module).__name__ == "GptOssExperts":  # Its code says 7, whatever the config does.
            module.limit = model.config.swiglu_limit
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
    for name, parameter in [*model.named_parameters(), *(each for each in model.named_buffers() if each[0].endswith(BUFFERS))]:
        spread = _spread(name, parameter, variant)
        value = spread * torch.randn_like(parameter) + (parameter if parameter.ndim == 1 else 0) - (0.5 if "q_norm" in name else 0)
        parameter.copy_(value.to(getattr(torch, variant.dtype)))


def _spread(name: str, parameter: Any, variant: Variant) -> float:
    if parameter.ndim == 1 or name.endswith("_bias"):
        return 0.15 if name.endswith("bias") else 0.4
    if re.search(r"mlp\.gate\.weight|router\.weight", name):
        return ROUTER_GAIN * parameter.shape[-1] ** -0.5
    branch = re.search("o_proj|down_proj|c_proj", name) is not None
    gain = variant.branch_gain if branch else variant.expert_gain if "experts.gate_up" in name else 1
    input_first = parameter.ndim == 3 and re.search("GptOss|Llama4", variant.config) is not None
    return GAIN * gain * parameter.shape[-2 if input_first else -1] ** -0.5


def _check_stored(model: Any, tensors: dict[str, Piece], folder: Path) -> None:
    """The file holds what the table of pieces says, under these names."""
    stored = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    state = model.state_dict()
    for name, piece in tensors.items():
        assert torch.equal(stored[name], piece.of(state[piece.parameter]).to(stored[name].dtype)), name


def _add_tensors(file: Path, more: dict[str, Any]) -> None:
    save_file(load_file(file) | more, file, metadata={"format": "pt"})


def _name_model_type(variant: Variant, folder: Path) -> None:
    if variant.model_type:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": variant.model_type}, indent=2) + "\n")


def save(model: Any, variant: Variant, folder: Path) -> None:
    """Config and weights as `save_pretrained` writes them, in the dtype of the variant."""
    dtype = getattr(torch, variant.dtype)
    stored = {name: value.to(dtype) for name, value in model.state_dict().items()}
    model.config.dtype = dtype
    total = sum(value.nbytes for value in stored.values())
    limit = total if variant.shards == 1 else int(total / (variant.shards - 0.5))
    model.save_pretrained(folder, state_dict=stored, max_shard_size=limit)
    assert len(list(folder.glob("*.safetensors"))) == variant.shards
    if variant.text_prefix == "model.language_model." == variant.file_prefix:
        save_file({name: stored[name] for name, _ in model.named_parameters()}, folder / "model.safetensors", metadata={"format": "pt"})


def _check_reload(variant: Variant, folder: Path, rows: Arrays, right: Arrays) -> None:
    """The folder alone gives the same logits, with no tensor missing or left over but those of a layer that transformers drops."""
    model, found = getattr(transformers, variant.model).from_pretrained(
        folder, local_files_only=True, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    dropped = f"model.layers.{model.config.get_text_config().num_hidden_layers}."
    found["unexpected_keys"] = [name for name in found["unexpected_keys"] if not (variant.mtp and name.startswith(dropped))]
    assert not any(found.values()), found
    move = difference(forward_outputs(prepare(model, variant), rows)["logits"], right["logits"])
    assert move == 0, f"reading {variant.name} back moves logits by {move}"


if __name__ == "__main__":
    main(sys.argv[1:])
