"""Chips that are known: what a device computes, holds and is called, read from `presets/hardware`. Needs no JAX."""

import functools
import re
from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from telamon.config import yamlio
from telamon.config.presets import ROOT


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class Chip:
    """A kind of TPU chip or GPU. A figure is of a chip unless it says device; a JAX device may be a part of a chip."""

    key: str
    """Name in a topology, such as ``v6e`` or ``h100``."""
    name: str
    platform: Literal["tpu", "gpu"]
    kinds: tuple[str, ...]
    """What `jax.Device.device_kind` may be."""
    bf16_tflops: float
    """Dense bf16 TFLOP/s."""
    memory_gb: float
    """Memory as sold, in GB."""
    hbm_gib: float
    """What a program may use of a JAX device's memory, in GiB."""
    largest: tuple[int, ...]
    """Chips of the largest slice (or node) each way; its length is the number of ways in which chips are joined."""
    hbm_gbps: float
    """Memory's bandwidth, in GB/s."""
    link_gbps: float
    """What one link to a neighbouring TPU chip carries each way, or NVLink to and from a GPU, in GB/s."""
    network_gbps: float
    """Network between slices or nodes, a chip's share each way, in GB/s."""
    host_gbps: float
    """What a chip sends to its host's memory, and at the same time reads from it, in GB/s."""
    tile: int
    """Rows and columns of a matrix unit: a product's sizes are rounded up to multiples of it."""
    matmul_share: float
    """Share of the peak that large products reach in a training step."""
    attention_share: float
    """Share of the peak that a fused attention kernel reaches where its head size fills the matrix unit."""
    hidden_share: float
    """Share of the weights' collectives that runs behind products at best."""
    sources: Mapping[str, str] = field(hash=False, repr=False)
    """Where each figure is from."""
    devices_per_chip: int = 1
    cores_per_chip: int = 1
    """What a slice's short name counts for a chip: ``v5p-8`` is 4 chips, ``v6e-8`` is 8."""
    flags: Mapping[str, bool | int | float | str] = field(default_factory=dict, hash=False)
    """XLA options that programs which train are compiled with."""
    chip_config: str | None = None
    """How libtpu shows the chip's cores, where its default is not what a job sees."""

    @property
    def flops(self) -> float:
        """Dense bf16 FLOP/s of a JAX device."""
        return self.bf16_tflops * 1e12 / self.devices_per_chip

    @property
    def memory_bytes(self) -> int:
        """Memory of a JAX device as sold."""
        return int(self.memory_gb * 1e9) // self.devices_per_chip

    @property
    def hbm_bytes(self) -> int:
        """What a program may use of a JAX device's memory."""
        return int(self.hbm_gib * 2**30)


@functools.cache
def chips() -> tuple[Chip, ...]:
    """All chips, TPUs by their name and then GPUs."""
    found = [read_chip(path.stem, yamlio.read(path)) for path in (ROOT / "hardware").glob("*.yml")]
    return tuple(sorted(found, key=lambda chip: (chip.platform != "tpu", chip.key)))


def read_chip(stem: str, values: Mapping[str, Any]) -> Chip:
    """The chip that a file of `presets/hardware` describes.

    Args:
        stem: the file's name: `tpu_v6e` is the chip ``v6e``, `tpu_7x` is ``tpu7x``, other names are the chip's.
        values: what the file holds.

    Raises:
        pydantic.ValidationError: a key is unknown or missing, or a value is of the wrong type.
    """
    key = re.sub(r"^tpu_(?=\d)", "tpu", stem).removeprefix("tpu_")
    return Chip(**{**values, "key": key})


def chip_of_kind(device_kind: str) -> Chip | None:
    """The chip of a device, by `jax.Device.device_kind` (such as ``TPU v6 lite``); none where it is not known."""
    return next((chip for chip in chips() if device_kind in chip.kinds), None)
