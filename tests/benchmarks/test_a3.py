"""The rows of A3: what a capacity adds to mixtures, machines of the right size, a fit that finds what it should."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.a3_predicted_speed import FITTED, fit, predicted
from benchmarks.a3_rows import ROWS

RESULT = Path(__file__).parents[2] / "benchmarks/results/A3.json"

PUBLISHED = [row for row in ROWS if row.rows is not None]
"""Those whose layout was published, so that no search has to run."""


def test_a_capacity_adds_work_and_no_parameters():
    """Mixtral 8x7B's 2 experts a token become 2.5 of 1.25 times as many places; 4,096 tokens are sent to 10,240 places and back."""
    [without] = [row.work for row in ROWS if (row.model, row.machine) == ("mixtral-8x7b", "v5p:4x4x8")]
    [row] = [row for row in ROWS if (row.model, row.machine) == ("mixtral-8x7b", "v6e:16x16")]
    assert row.work.parameters == without.parameters == 46_702_792_704
    assert row.work.matmul_parameters == without.matmul_parameters == 12_879_925_248 - 32000 * 4096  # active, less the embedding's look-up
    products = {product.name: product for product in row.work.products}
    assert products["ffn.experts.up"].used == 2.5
    assert products["ffn.dispatch"].inputs == products["ffn.combine"].inputs == 10_240


def test_there_are_thirteen_rows_on_machines_of_their_names():
    assert len(ROWS) == 13
    chips = [row.topology.chip_count for row in ROWS]
    assert chips == [256, 256, 256, 256, 256, 256, 256, 256, 128, 64, 256, 8, 128]
    for row in PUBLISHED:
        assert row.layout.total("data", "fsdp", "expert", "tensor") == row.topology.device_count, row


def test_the_fit_finds_the_shares_that_made_the_figures():
    rows = [row for row in PUBLISHED if not row.mixture and row.model != "llama3.1-405b"]
    works = {row: row.work for row in rows}
    shares = (0.7, 0.6, 0.55, 0.45, 0.3)
    made = [replace(row, published=predicted(row, works[row], shares).tokens_per_second_per_device) for row in rows]
    found = fit(made, {new: works[row] for new, row in zip(made, rows, strict=True)})
    for name, share, value in zip(FITTED, shares, found, strict=True):
        assert value == pytest.approx(share, abs=0.02), name


def test_the_result_that_is_shipped_reaches_its_target():
    figures = json.loads(RESULT.read_text())
    assert figures["holds"]
    assert figures["figures"]["rows within 15 %, the row left out"] >= 8
    assert figures["figures"]["rows within 30 %, the row left out"] == 13
