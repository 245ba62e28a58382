"""Which part of which parameter each tensor of the file is: transformers fuses experts in memory that most files keep apart.

Also what is asked of routers: that every expert is chosen, and that no choice is so near a tie that rounding could turn it.
"""
# pyright: reportMissingImports=false

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from fixture_variants import Variant

BUFFERS = ("e_score_correction_bias",)
"""Part of the file though no gradient reaches them."""
CHOICE = 2e-4
"""By which the least of the chosen scores leads the best of the rest: rounding moves scores by some 1e-6."""
# By `model_type`: how a file that keeps experts apart names an expert's gate, up and down.
APART = {
    "mixtral": ("block_sparse_moe.experts", "w1", "w3", "w2"),
    **{kind: ("mlp.experts", "gate_proj", "up_proj", "down_proj") for kind in ("qwen3_moe", "deepseek_v2", "deepseek_v3")},
}


class Unlucky(AssertionError):
    """Other random weights might do."""


@dataclass(frozen=True)
class Piece:
    """A part of a parameter."""

    parameter: str
    index: tuple[Any, ...] = ()

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """A view of it."""
        return whole[self.index]


def file_tensors(model: Any, variant: Variant) -> dict[str, Piece]:
    """The parameters that take part in text, as the file names and cuts them."""
    found = {}
    kind = model.config.model_type
    for name, parameter in model.named_parameters():
        if name.startswith(variant.text_prefix):
            stored = variant.file_prefix + name.removeprefix(variant.text_prefix)
            found |= apart(name, stored, parameter, kind) if kind in APART else {stored: Piece(name)}
    return found


def apart(name: str, stored: str, parameter: torch.Tensor, kind: str) -> dict[str, Piece]:
    """The tensors of a file that keeps experts apart in one parameter, which the file without experts would call `stored`."""
    place, *names = APART[kind]
    stored = stored.replace("mlp", place.split(".")[0]) if "mlp.gate.weight" in stored else stored
    if ".experts." not in name:
        return {stored: Piece(name)}
    layer = stored.split("mlp.experts.")[0]
    gate, up, down = ({f"{layer}{place}.{e}.{part}.weight": e for e in range(len(parameter))} for part in names)
    if name.endswith("down_proj"):
        return {path: Piece(name, (e,)) for path, e in down.items()}
    F = parameter.shape[1] // 2
    return {path: Piece(name, (e, slice(0, F))) for path, e in gate.items()} | {
        path: Piece(name, (e, slice(F, None))) for path, e in up.items()
    }


def finest(model: Any, tensors: dict[str, Piece]) -> dict[str, Piece]:
    """The same with fused tensors cut into one for each expert, gate and up apart, and with the buffers of the file."""
    state = model.state_dict()
    found: dict[str, Piece] = {}
    for name, piece in tensors.items():
        cuts = _cuts(name, state[piece.parameter], model.config.model_type) if not piece.index else {"": ()}
        found |= {name + suffix: Piece(piece.parameter, piece.index + cut) for suffix, cut in cuts.items()}
    return found | {name: Piece(name) for name in state if name.endswith(BUFFERS)}


def _cuts(name: str, whole: torch.Tensor, kind: str) -> dict[str, tuple[Any, ...]]:
    if ".experts." not in name:
        return {"": ()}
    if "gate_up" not in name:
        return {f"[{e}]": (e,) for e in range(len(whole))}
    half = whole.shape[-1] // 2
    halves = (slice(0, None, 2), slice(1, None, 2)) if kind == "gpt_oss" else (slice(0, half), slice(half, None))
    return {f"[{e}] {part}": (e, ..., cut) for e in range(len(whole)) for part, cut in zip(("gate", "up"), halves, strict=True)}


class Choices:
    """The smallest lead by which routers chose."""

    def __init__(self) -> None:
        self.margin = float("inf")

    def add(self, scores: torch.Tensor, k: int) -> None:
        best = scores.double().topk(min(k + 1, scores.shape[-1]), dim=-1).values
        if best.shape[-1] > k:
            self.margin = min(self.margin, (best[..., k - 1] - best[..., k]).min().item())


@contextmanager
def watched() -> Iterator[Choices]:
    """Record what `torch.topk` is asked for, which is how every router of transformers chooses experts and groups."""
    original, choices = torch.topk, Choices()

    def topk(scores: torch.Tensor, k: int, *args: Any, **kwargs: Any) -> Any:
        choices.add(scores, k)
        return original(scores, k, *args, **kwargs)

    torch.topk = topk
    try:
        yield choices
    finally:
        torch.topk = original
