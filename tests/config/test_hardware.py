"""The table of chips: closed, each figure with its source, and found by what JAX calls a device."""

from dataclasses import fields

import pytest
from pydantic import ValidationError

from telamon.config import presets, yamlio
from telamon.config.hardware import chip_of_kind, chips, read_chip

_COUNTS = {"devices_per_chip", "cores_per_chip"}
"""What a chip is made of rather than a figure of it."""


def test_every_chip_has_the_name_that_topologies_use():
    assert [chip.key for chip in chips()] == ["tpu7x", "v4", "v5e", "v5p", "v6e", "a100", "a100-40gb", "b200", "h100", "h200"]


@pytest.mark.parametrize("chip", chips(), ids=lambda chip: chip.key)
def test_every_figure_has_a_source(chip):
    figures = {f.name for f in fields(chip) if isinstance(getattr(chip, f.name), int | float)} - _COUNTS
    assert figures <= set(chip.sources)
    assert set(chip.sources) <= {f.name for f in fields(chip)}


@pytest.mark.parametrize("chip", chips(), ids=lambda chip: chip.key)
def test_a_program_may_use_most_of_a_device_and_no_more(chip):
    assert 0.7 * chip.memory_bytes < chip.hbm_bytes < 1.09 * chip.memory_bytes  # sold in GB or in GiB


@pytest.mark.parametrize(("key", "value"), [("bf16_tflop", 918), ("kinds", "TPU v6e"), ("memory_gb", "32")])
def test_a_key_or_type_that_is_not_known_is_refused(key, value):
    values = yamlio.read(presets.find("hardware", "tpu_v6e"))
    assert read_chip("tpu_v6e", values).key == "v6e"
    with pytest.raises(ValidationError, match=key):
        read_chip("tpu_v6e", {**values, key: value})


def test_a_device_is_found_by_the_whole_of_its_kind():
    found = {
        kind: chip_of_kind(kind) for kind in ("TPU v5", "TPU v5 lite", "NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe", "TPU v5 litest")
    }
    assert [chip and chip.key for chip in found.values()] == ["v5p", "v5e", "a100-40gb", "a100", None]
