"""Proof that a fixture would show a mistake: swapped tensors, a setting not read, and how little rounding matters beside them."""
# pyright: reportMissingImports=false

import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from fixture_experts import CHOICE, Piece, Unlucky, finest, watched
from fixture_outputs import Arrays, far_logits, forward_outputs, logits

SEEN = 1e-2
"""What a mistake must move some logit by."""
ROUNDING = 5e-5
"""What rounding may move a logit by: half of the 1e-4 within which a right implementation lies."""


@torch.no_grad()
def smallest_swap(model: Any, rows: Arrays, tensors: dict[str, Piece]) -> dict[str, Any]:
    """The two tensors of one shape whose exchange moves the logits least, and by how much; fused experts count as one each."""
    ids = torch.from_numpy(rows["ids"])
    right = logits(model, ids)
    by_shape = defaultdict(list)
    state = model.state_dict()
    for name, piece in finest(model, tensors).items():
        tensor = piece.of(state[piece.parameter])
        by_shape[tuple(tensor.shape)].append((name, tensor))
    pairs = [pair for same in by_shape.values() for pair in itertools.combinations(same, 2)]
    moves = {}
    for (a, left), (b, other) in pairs:
        _exchange(left, other)
        moves[a, b] = (logits(model, ids) - right).abs().max().item()
        _exchange(left, other)
    assert torch.equal(logits(model, ids), right)
    pair = min(moves, key=moves.__getitem__)
    if moves[pair] < SEEN:
        raise Unlucky(f"exchanging {pair[0]} and {pair[1]} moves no logit by more than {moves[pair]:.2g}")
    return {"pairs": len(pairs), "smallest_move": moves[pair], "by": list(pair)}


def _exchange(a: torch.Tensor, b: torch.Tensor) -> None:
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)


def moves_without(
    build: Callable[[dict[str, Any]], Any], rows: Arrays, right: Arrays, changes: tuple[dict[str, Any], ...]
) -> list[dict[str, Any]]:
    """How far the logits of each changed config lie from the right ones; `build` makes a model of the same weights."""
    found = []
    for change in changes:
        wrong = forward_outputs(build(change), rows)
        move = max(difference(wrong[name], right[name]) for name in ("logits", "jump_logits"))
        assert move > SEEN, f"{change} moves no logit by more than {move:.2g}: the fixture would not show whether it is read"
        found.append({"change": change, "move": move})
    return found


@torch.no_grad()
def router_margin(model: Any, rows: Arrays) -> float | None:
    """The smallest lead of a chosen expert's score, or group's, over the best that was not chosen, in any row; None without routers."""
    with watched() as choices:
        forward_outputs(model, rows)
    if choices.margin == float("inf"):
        return None
    if choices.margin < CHOICE:
        raise Unlucky(f"a router chooses by no more than {choices.margin:.1g}, so that rounding could turn it")
    return choices.margin


def rounding(model: Any, rows: Arrays, right: Arrays) -> dict[str, float]:
    """How far float64 sums and rotary frequencies one unit in the last place higher move the logits. Spoils the model.

    The first frequency is left as it is: a power of zero, exact everywhere. Padded rows are left out: transformers' mask of float64 becomes infinite in its softmax of float32.
    """
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq"):
            buffer[1:] = torch.nextafter(buffer, torch.full_like(buffer, torch.inf))[1:]
    model.double()
    with torch.no_grad():
        plain = logits(model, torch.from_numpy(rows["ids"]))
        long_ids, offsets = torch.from_numpy(rows["long_ids"])[None], torch.from_numpy(rows["long_offsets"])
        far = far_logits(model, long_ids, positions=offsets[-1] + torch.arange(long_ids.shape[1])[None])
        jumping = logits(model, long_ids, positions=torch.from_numpy(rows["jump_positions"])[None])
    found = {
        "logits": difference(plain.numpy(), right["logits"]),
        "long_logits": difference(far[0].numpy(), right["long_logits"][-1]),
        "jump_logits": difference(jumping[0].numpy(), right["jump_logits"]),
    }
    assert max(found.values()) < ROUNDING, f"rounding alone moves logits by {found}"
    return found


def difference(a: np.ndarray, b: np.ndarray) -> float:
    found = np.abs(a.astype(np.float64) - b).max()
    assert np.isfinite(found)
    return float(found)
