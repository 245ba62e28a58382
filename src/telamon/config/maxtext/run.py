"""MaxText's words for a run, section by section of ours."""

import math
from pathlib import Path
from typing import Any

from telamon.config.maxtext.settings import Settings
from telamon.errors import ConfigError

_AXES = ("data", "fsdp", "expert", "tensor")
_REMAT = {None: "none", "none": "none", "full": "full"} | dict.fromkeys(
    ("minimal", "minimal_flash", "minimal_with_context", "minimal_with_quantization", "minimal_with_context_and_quantization"), "dots"
)
_HF_KINDS = {"json": "jsonl", "parquet": "parquet", "text": "text"}
_TO_BE_NAMED = "NAME-YOUR-DOCUMENTS.jsonl"
_PACKING = {"first_fit": "first_fit", "best_fit": "best_fit", "concat_then_split": "split"}
_OWN_VOCABULARY = 4096


def mesh_section(settings: Settings) -> dict[str, Any]:
    """Sizes of the axes within a slice and across slices."""
    across = {axis: settings[f"dcn_{axis}_parallelism"] for axis in _AXES}
    slices = settings["num_slices"]
    for axis, size in across.items():
        if size == -1:
            known = math.prod(other for other in across.values() if other != -1)
            across[axis] = max(slices // known, 1) if slices > 0 else 1
    within = {axis: settings[f"ici_{axis}_parallelism"] for axis in _AXES}
    if within["expert"] == across["expert"] == 1:
        within, across = ({axis: size for axis, size in sizes.items() if axis != "expert"} for sizes in (within, across))
    return within if set(across.values()) == {1} else within | {"cross_slice": across}


def devices_of(settings: Settings, mesh: dict[str, Any], stated: int | None) -> int:
    """Devices of the run: as stated, or from a mesh without an open axis, or one."""
    if stated is not None:
        return stated
    within = [mesh.get(axis, 1) for axis in _AXES]
    if -1 not in within:
        return math.prod(within) * math.prod(mesh.get("cross_slice", {}).values())
    settings.note("per_device_batch_size", "train.batch_size counts the rows of all devices, taken for one here; --devices says how many")
    return 1


def train_section(settings: Settings, devices: int) -> dict[str, Any]:
    """Steps, rows and numerics."""
    plan, steps = settings["learning_rate_schedule_steps"], settings["steps"]
    plan, steps = (steps if plan == -1 else plan), (plan if steps == -1 else steps)
    if steps > plan:
        settings.note("steps", f"MaxText trains at rate 0 after the schedule's {plan} steps; the run ends there")
    accumulate = settings["gradient_accumulation_steps"]
    section = {
        "steps": plan,
        "stop_at": steps if steps < plan else None,
        "batch_size": rows(settings, "per_device_batch_size", devices) * accumulate,
        "accumulate": accumulate,
        "seq_len": settings["max_target_length"],
        "seed": settings["init_weights_seed"],
        "compute_dtype": settings["dtype"],
        "remat": _remat(settings),
        "z_loss": settings["z_loss_multiplier"],
        "log_every": settings["log_period"],
    }
    if section["compute_dtype"] not in ("bfloat16", "float32"):
        settings.note("dtype", "activations are bfloat16 or float32; bfloat16 is taken")
        section["compute_dtype"] = "bfloat16"
    return {key: value for key, value in section.items() if value is not None}


def experts_section(settings: Settings, router: Any) -> dict[str, Any]:
    """How a mixture with this router (a `telamon.layers.router.RouterConfig`) is trained."""
    section: dict[str, Any] = {"bias_rate": settings["routed_bias_update_rate"]} if router.selection_bias else {}
    if not settings["sparse_matmul"]:
        factor = settings["capacity_factor"]
        section |= {"path": "capacity", "capacity_factor": factor} if factor > 0 else {"path": "dense"}
    if weight := settings["load_balance_loss_weight"]:
        # MaxText's loads sum to 1, ours to top_k.
        section |= {"balance": "sequence", "balance_weight": weight / router.top_k}
        settings.note("load_balance_loss_weight", "the term for an even load is over each document here, over each row in MaxText")
    return section


def rows(settings: Settings, key: str, devices: int) -> int:
    """Rows of all devices. Raises ConfigError for less than one."""
    count = int(settings[key] * devices)
    if count < 1:
        raise ConfigError(f"{key}={settings[key]} is less than a row on {devices} device{'s' * (devices > 1)}; say how many with --devices")
    return count


def _remat(settings: Settings) -> str:
    policy = settings["remat_policy"]
    if policy not in _REMAT:
        settings.note(
            "remat_policy",
            "train.remat is none, full, dots or offload; full is taken, which needs little memory of a device and none of the host",
        )
    return _REMAT.get(policy, "full")


def optimizer_section(settings: Settings) -> dict[str, Any]:
    """The optimizer and its schedule."""
    kind, clip = settings["opt_type"], settings["gradient_clipping_threshold"]
    section = {"kind": "muon" if kind == "muon" else "adamw", "learning_rate": settings["learning_rate"]}
    section |= {"b1": settings["adam_b1"], "b2": settings["adam_b2"], "eps": settings["adam_eps"]}
    section |= {"weight_decay": settings["adam_weight_decay"], "clip_norm": clip or None, "schedule": _schedule(settings)}
    section["offload"] = settings["optimizer_memory_host_offload"]
    if kind == "muon":
        section["momentum"] = settings["muon_beta"]
        if settings["muon_weight_decay"] != section["weight_decay"]:
            settings.note("muon_weight_decay", "one weight decay serves Muon and AdamW; adam_weight_decay is taken")
    elif kind not in ("adamw", "adam_pax"):
        settings.note("opt_type", "there are adamw and muon; adamw is taken")
    if section["weight_decay"]:
        settings.note("adam_weight_decay", "matrices alone are decayed; MaxText decays norms and biases too unless adamw_mask names them")
    return section


def _schedule(settings: Settings) -> dict[str, Any]:
    kind = settings["lr_schedule_type"]
    section = {"kind": kind, "warmup_fraction": settings["warmup_steps_fraction"]}
    section["final_fraction"] = settings["learning_rate_final_fraction"]
    if kind == "wsd":
        section["decay_fraction"] = settings["wsd_decay_steps_fraction"]
        if settings["wsd_decay_style"] != "linear":
            settings.note("wsd_decay_style", "the rate falls along a straight line")
    return section


def data_section(settings: Settings, vocab_size: int) -> dict[str, Any]:
    """Sources, tokenizer and packing."""
    section: dict[str, Any] = {"sources": _sources(settings)}
    if tokenizer := _tokenizer(settings, vocab_size):
        section["tokenizer"] = tokenizer
    section |= _packing(settings)
    section["shuffle"] = settings["enable_data_shuffling"]
    if settings["dataset_type"] in ("hf", "grain"):
        section["epochs"] = settings["num_epoch"]
    if settings["eval_interval"] < 1:
        section["val_fraction"] = 0.0
    return section


def _sources(settings: Settings) -> list[dict[str, Any]]:
    kind = settings["dataset_type"]
    if kind == "synthetic":
        return [{"kind": "synthetic", "length": settings["max_target_length"]}]
    found: list[dict[str, Any]] = []
    if kind == "hf" and settings["hf_path"] in _HF_KINDS and settings["hf_train_files"]:
        found = [{"kind": _HF_KINDS[settings["hf_path"]], "path": settings["hf_train_files"]}]
    elif kind == "grain" and settings["grain_file_type"] == "parquet" and settings["grain_train_files"]:
        found = [_weighted("parquet", part) for part in str(settings["grain_train_files"]).split(";")]
    if not found:
        reason = f"write the documents to text, JSONL or Parquet and name them in data.sources; till then the run refuses to start, for {_TO_BE_NAMED} is not there"
        settings.note("dataset_type", reason)
        for named in ("hf_path", "hf_train_files", "grain_train_files"):
            if settings.given(named):
                settings.note(named, "it names data that dataset_type is about")
        # Not some data that are there: a run on the wrong text looks like one on the right text.
        return [{"kind": "jsonl", "path": _TO_BE_NAMED}]
    columns = settings["train_data_columns"]
    column = columns[0] if isinstance(columns, list) and columns else columns
    return [source if source["kind"] == "text" else source | {"field": column} for source in found]


def _weighted(kind: str, part: str) -> dict[str, Any]:
    """`path` or `path,weight`."""
    path, comma, weight = part.strip().rpartition(",")
    if not comma:
        return {"kind": kind, "path": weight}
    try:
        return {"kind": kind, "path": path, "weight": float(weight)}
    except ValueError:
        raise ConfigError(f"grain_train_files: {part.strip()!r}: what follows the comma is a weight, a number") from None


def _tokenizer(settings: Settings, vocab_size: int) -> dict[str, Any]:
    path = settings["tokenizer_path"]
    local = Path(path) if path else None
    if local is not None and (local.suffix == ".json" or (local / "tokenizer.json").is_file()):
        return {"path": str(path)}
    own = min(_OWN_VOCABULARY, vocab_size)
    if settings["dataset_type"] != "synthetic":
        settings.note(
            "tokenizer_path",
            f"name a Hugging Face tokenizer.json in data.tokenizer.path; one of {own:,} tokens is trained on the data till then",
        )
    return {} if own == _OWN_VOCABULARY else {"vocab_size": own}


def _packing(settings: Settings) -> dict[str, Any]:
    limit = settings["max_segments_per_seq"]
    if not settings["packing"]:  # a document a row, cut at its end
        return {"packing": "drop_tail", "max_segments": 1}
    if settings["dataset_type"] == "synthetic":
        return {"packing": "split"}
    if not settings["use_truncation"]:
        return {"packing": "split"}
    way = _PACKING[settings["grain_packing_type"]] if settings["dataset_type"] == "grain" else "first_fit"
    return {"packing": way} | ({"max_segments": limit} if limit and limit > 0 and way != "split" else {})


def run_section(settings: Settings) -> dict[str, Any]:
    """Where the run lives."""
    section = {"root": settings["base_output_directory"], "name": settings["run_name"]}
    if settings.given("jax_cache_dir"):
        section["compile_cache"] = settings["jax_cache_dir"]
    return {key: value for key, value in section.items() if value}


def eval_section(settings: Settings, devices: int) -> dict[str, Any]:
    """Validation during training."""
    every, batches = settings["eval_interval"], settings["eval_steps"]
    if every < 1:
        return {}  # no text is held out then
    section: dict[str, Any] = {"every": every, "batches": batches if batches > 0 else None}
    if settings["eval_per_device_batch_size"]:
        section["batch_size"] = rows(settings, "eval_per_device_batch_size", devices)
    return section


def checkpoint_section(settings: Settings) -> dict[str, Any]:
    """What is saved."""
    if not settings["enable_checkpointing"]:
        settings.note("enable_checkpointing", "a checkpoint is written at the end of a run all the same")
        return {"every": None}
    section = {"every": settings["checkpoint_period"], "asynchronous": settings["async_checkpointing"]}
    keep = settings["max_num_checkpoints_to_keep"]
    return section if keep is None else section | {"keep": keep}


def watch_section(settings: Settings) -> dict[str, Any]:
    """Where metrics go."""
    section = {"tensorboard": settings["enable_tensorboard"]}
    return section | ({"wandb_project": settings["wandb_project_name"]} if settings["enable_wandb"] else {})


def profile_section(settings: Settings) -> dict[str, Any]:
    """Looking inside a step."""
    section: dict[str, Any] = {"hlo": True} if settings["dump_hlo"] else {}
    profiler = settings["profiler"]
    if profiler == "xplane":
        first = settings["skip_first_n_steps_for_profiler"]
        section["steps"] = f"{first}:{first + settings['profiler_steps']}"
    elif profiler:
        settings.note("profiler", "traces are JAX's own; profile.steps takes one")
    return section
