"""What experts take while they work: bounded, and of the kernels that devices get."""

from typing import Any

import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from telamon.config.load import load_run
from telamon.config.schema import AXES
from telamon.plan.mixtures import at_work
from telamon.plan.working_set import ROWS

V6E = AbstractDevice("TPU v6 lite", 1, "tpu")


def _at_work(preset: str = "qwen3-30b-a3b", *, rows: int = 1, device: Any = V6E, path: str = "blocked", **mesh: int) -> int:
    spec = load_run(overrides=[f"model.preset={preset}"]).config.model.spec()
    sizes = tuple(mesh.get(axis, 1) for axis in AXES)
    on = AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES), abstract_device=device)
    how = {"d_model": spec.d_model, "rows": rows, "seq_len": 4096, "dtype": "bfloat16", "path": path, "mesh": on}
    return at_work(spec.stacks[0].pattern, **how)


def test_a_dense_model_has_none():
    assert _at_work("qwen3-0.6b", fsdp=4) == 0


def test_it_grows_with_the_tokens_by_their_sorted_rows_alone():
    """Turns and blocks of experts are bounded: what comes with 4,096 tokens more are their sorted rows, 8 a token, their gradients, and what
    turns these into the tokens'."""
    sizes = [_at_work(rows=rows, fsdp=16) for rows in (8, 9, 10)]
    a_row = 4096 * 8 * 2048 * 2
    assert sizes[2] - sizes[1] == pytest.approx(sizes[1] - sizes[0], rel=0.05)
    assert 2 * a_row <= sizes[1] - sizes[0] <= 6 * a_row


def test_experts_beyond_a_block_take_nothing():
    """128 experts of which a block holds as many as 1 GiB of gradients: with all of them elsewhere but 16, the blocks are the same."""
    assert _at_work(fsdp=2, expert=8) <= 1.2 * _at_work(fsdp=16)


def test_a_number_of_tokens_that_marks_rows_elsewhere_is_nothing_special():
    assert _at_work(rows=ROWS // 1000, fsdp=4) == _at_work(rows=1, fsdp=4)


def test_it_is_of_the_kernels_that_the_devices_get():
    """Kernels read matrices in the type of activations and keep rows' products apart; a loop over blocks of rows casts one matrix at a time."""
    kernels, blocks = _at_work(path="auto", fsdp=16), _at_work(path="blocked", fsdp=16)
    assert kernels != blocks and kernels == pytest.approx(blocks, rel=0.4)
