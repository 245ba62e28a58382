"""A model preset in figures: sizes, parameters, work, memory, and which checks were made of it. Nothing is allocated."""

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from telamon.config.load import load_run, plain
from telamon.config.presets import about_model
from telamon.config.schema import ModelConfig
from telamon.layers.moe import MoEConfig
from telamon.models.hf_family import HfFamily
from telamon.models.spec import BlockSpec, ModelSpec
from telamon.models.weights import Model, flatten
from telamon.records.checks import CHECKS, Check
from telamon.records.record import FOLDER, Record, read_records
from telamon.train.job import model_flops

COMMON_LENGTH = 4096
"""Row length that work is quoted at, beside the longest text of the model."""
SERVED_LENGTH = 8192
"""Length of the sequence whose cache is quoted."""
TRAINING_BYTES = 16
"""A parameter in training: weight, gradient and AdamW's two moments, float32."""
SERVING_BYTES = 2
"""A value in serving: bfloat16."""


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters, summed from the weights' shapes."""

    total: int
    active: int | None
    """Of a mixture: all but those of experts that a token does not go to; both tables count. None: every token meets all."""
    embedding: int
    """The table of tokens."""
    positions: int
    """The table of positions; 0 where the model has none."""
    head: int
    """The output head's own; 0 where it is the embedding table."""
    per_layer: tuple[int, ...]
    """Of one layer; several numbers where layers differ in size."""
    matmul: int
    """What a token is multiplied with: all but what is looked up, the head once."""


@dataclass(frozen=True)
class Memory:
    """Bytes. Activations are counted in none of them: they depend on the batch, the row length and `train.remat`."""

    training: int
    """Weights, gradients and AdamW's moments in float32, over all devices."""
    weights: int
    """In bfloat16, to serve."""
    cache_per_token: int
    """Keys and values that one more token adds while no window or chunk is full."""
    cache_per_token_beyond: int
    """The same once all windows and chunks are full."""
    cache_served: int
    """Of one sequence of 8,192 tokens, where a layer keeps no more than its window or chunk."""
    cache_kept: int
    """The same as this version keeps it."""


@dataclass(frozen=True)
class Checked:
    """A check and what came out of it."""

    name: str
    title: str
    whole: Record | None
    """Of the preset as it is; none: not made."""
    tiny: Record | None
    """Of its blocks at shrunk sizes."""
    for_tiny: bool
    """Whether the check makes sense at shrunk sizes."""


@dataclass(frozen=True)
class Card:
    """What `telamon models show` shows."""

    name: str
    about: str
    """Where the sizes are from and what to mind, as the preset says it."""
    repository: str | None
    """On Hugging Face."""
    architecture: str | None
    """Transformers' class."""
    config: ModelConfig
    layers: str
    """The pattern of layers, in words."""
    experts: str | None
    """Of a mixture its experts, in words."""
    parameters: Parameters
    flops: dict[int, float]
    """Row length -> model FLOPs a token, forward and backward; a forward alone takes a third."""
    memory: Memory
    checks: tuple[Checked, ...]
    records: Path
    """Where records of checks were looked for."""

    def figures(self) -> dict[str, Any]:
        """Everything but the checks as nested dicts, to compare two models."""
        sizes = {name: value for name, value in plain(self.config).items() if name != "preset"}
        memory = {f"{name}_bytes": value for name, value in asdict(self.memory).items()}
        return {
            "model": sizes,
            "repository": self.repository,
            "architecture": self.architecture,
            "layers": self.layers,
            "experts": self.experts,
            "parameters": asdict(self.parameters),
            "flops_per_token": {str(length): round(value) for length, value in self.flops.items()},
            "memory": memory,
        }

    def as_json(self) -> dict[str, Any]:
        """Everything, for JSON."""
        checks = {
            check.name: {"whole": check.whole and asdict(check.whole), "tiny": check.tiny and asdict(check.tiny)} for check in self.checks
        }
        forward = {str(length): round(value / 3) for length, value in self.flops.items()}
        return {"name": self.name, "about": self.about, **self.figures(), "forward_flops_per_token": forward, "checks": checks}


def make_card(name: str, *, records: Path = FOLDER, lengths: Collection[int] = ()) -> Card:
    """The card of a preset.

    Args:
        name: a model preset.
        records: folder of the records; one that is not there has none.
        lengths: row lengths that work is quoted at, beside the model's own.

    Raises:
        ConfigError: no preset has this name, or a file of the folder is no record.
    """
    config = load_run(overrides=[f"model.preset={name}"]).config.model
    spec: ModelSpec = config.spec()
    model, about = Model(spec), about_model(name)
    repository = re.search(r"\b[\w.-]+/[\w.-]+[\w-]", about)
    longest = config.position_limit or config.max_positions or COMMON_LENGTH
    return Card(
        name=name,
        about=about,
        repository=repository[0] if repository else None,
        architecture=config.hf_architecture if isinstance(config, HfFamily) else None,
        config=config,
        layers=layers_in_words(spec),
        experts=experts_in_words(spec),
        parameters=_parameters(model),
        flops={length: model_flops(model, seq_len=length) for length in sorted({min(COMMON_LENGTH, longest), longest, *lengths})},
        memory=_memory(model),
        checks=_checks(name, read_records(records)),
        records=records,
    )


def layers_in_words(spec: ModelSpec) -> str:
    """How attention sees along the layers, such as "26: 4 times (5 within the last 512 tokens, 1 over all before), 2 within ..."."""
    parts = []
    for stack in spec.stacks:
        inner = ", ".join(f"{len(list(same))} {sight}" for sight, same in groupby(map(_sight, stack.pattern)))
        parts.append((stack.repeats, _sight(stack.pattern[0]) if len(stack.pattern) == 1 else f"times ({inner})"))
    # Stacks also differ in what stands beside attention.
    merged = [(sum(count for count, _ in same), words) for words, same in groupby(parts, key=itemgetter(1))]
    return f"{len(spec.blocks)}: " + ", ".join(f"{count} {words}" for count, words in merged)


def experts_in_words(spec: ModelSpec) -> str | None:
    """The experts of a mixture, such as "256 of width 2,048 in 58 of 61 layers; a token goes to 8, and to one that all share"."""
    mixtures = [block.ffn for block in spec.blocks if isinstance(block.ffn, MoEConfig)]
    if not mixtures:
        return None
    ffn = mixtures[0]
    shared = "" if ffn.shared is None else f", and to one of width {ffn.shared.d_ff:,} that all share"
    where = f"in {len(mixtures)} of {len(spec.blocks)} layers"
    return f"{ffn.router.n_experts:,} of width {ffn.d_ff:,} {where}; a token goes to {ffn.router.top_k}{shared}"


def _sight(block: BlockSpec) -> str:
    window, chunk = block.mixer.attention_window, block.mixer.attention_chunk
    if chunk is not None:
        return f"within chunks of {chunk:,} tokens"
    return "over all before" if window is None else f"within the last {window:,} tokens"


def _read_again(block: BlockSpec) -> int | None:
    """Tokens whose keys and values a later one may read at most; None: all."""
    mixer = block.mixer
    return min((limit for limit in (mixer.attention_window, mixer.attention_chunk) if limit is not None), default=None)


def _parameters(model: Model) -> Parameters:
    sizes = {path: info.size for path, info in flatten(model.info).items()}
    per_layer = []
    for number, stack in enumerate(model.spec.stacks):
        for index in range(len(stack.pattern)):
            prefix = f"stacks.{number}.blocks.{index}."
            per_layer.append(sum(size for path, size in sizes.items() if path.startswith(prefix)) // stack.repeats)
    return Parameters(
        total=model.parameter_count,
        active=model.active_parameters if model.active_parameters < model.parameter_count else None,
        embedding=sizes["embedding"],
        positions=sizes.get("positions", 0),
        head=sizes.get("head", 0),
        per_layer=tuple(dict.fromkeys(per_layer)),
        matmul=model.matmul_parameters,
    )


def _memory(model: Model) -> Memory:
    limits = map(_read_again, model.spec.blocks)
    beyond = max((limit for limit in limits if limit is not None), default=0)
    return Memory(
        training=TRAINING_BYTES * model.parameter_count,
        weights=SERVING_BYTES * model.parameter_count,
        cache_per_token=_cache_bytes(model, 1),
        cache_per_token_beyond=_cache_bytes(model, beyond + 1) - _cache_bytes(model, beyond),
        cache_served=_cache_bytes(model, SERVED_LENGTH),
        cache_kept=_cache_bytes(model, SERVED_LENGTH, whole=True),
    )


def _cache_bytes(model: Model, tokens: int, *, whole: bool = False) -> int:
    """Bytes of one sequence's cache; `whole`: layers of a window or of chunks keep every token too."""
    total = 0
    for block in model.spec.blocks:
        limit = None if whole else _read_again(block)
        shapes = block.mixer.cache_shapes(batch=1, length=tokens if limit is None else min(limit, tokens))
        total += sum(math.prod(shape) for shape in shapes.values())
    return SERVING_BYTES * total


def _checks(name: str, records: Sequence[Record]) -> tuple[Checked, ...]:
    made = {(record.check, record.tiny): record for record in records if record.preset == name}

    def checked(check: Check) -> Checked:
        return Checked(check.name, check.title, made.get((check.name, False)), made.get((check.name, True)), not check.whole_only)

    return tuple(map(checked, CHECKS.values()))
