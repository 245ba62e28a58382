from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from pydantic import ValidationError

from telamon.config.schema import AXES, AxisSizes, MeshConfig
from telamon.errors import ConfigError
from telamon.parallel.mesh import build_mesh


@pytest.mark.xdist_group("mesh")
@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, {"fsdp": 8}),
        ({"fsdp": 8}, {"fsdp": 8}),
        ({"data": 2, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}),
        ({"data": -1, "fsdp": 1}, {"data": 8}),
    ],
    ids=str,
)
def test_a_mesh_has_all_axes_and_fills_one(sizes: dict[str, Any], expected: dict[str, int]):
    mesh = build_mesh(MeshConfig(**sizes))
    assert mesh.axis_names == AXES
    assert dict(mesh.shape) == dict.fromkeys(AXES, 1) | expected
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert sorted(device.id for device in mesh.devices.flat) == list(range(8))


@pytest.mark.xdist_group("mesh")
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"fsdp": 3}, r"the mesh \(fsdp=3\) needs 3 devices, and there are 8; mesh.fsdp=-1 takes what is left"),
        ({"tensor": 3}, r"the mesh \(tensor=3\) needs a multiple of 3 devices, and there are 8"),
        ({"fsdp": 4, "cross_slice": AxisSizes(data=4)}, r"\(fsdp=4 on 4 slices\) needs 16 devices, and there are 8"),
    ],
    ids=str,
)
def test_a_mesh_that_does_not_fit_the_devices_is_refused(sizes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        build_mesh(MeshConfig(**sizes))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": -1}, "only one mesh axis may be -1; got mesh.data, mesh.fsdp"),
        ({"tensor": 0}, r"mesh.tensor=0: the size of a mesh axis is at least 1, or -1"),
        ({"fsdp": -2}, r"mesh.fsdp=-2"),
        ({"cross_slice": {"data": -1}}, "axis data has size -1"),
    ],
    ids=str,
)
def test_sizes_that_count_nothing_are_refused(sizes: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        MeshConfig(**sizes)


class _Chip:
    """A device of a slice, as far as laying out a mesh goes."""

    platform = device_kind = "chip"

    def __init__(self, number: int, slice_index: int):
        self.id, self.slice_index, self.process_index = number, slice_index, slice_index

    def __repr__(self) -> str:
        return f"chip {self.id} of slice {self.slice_index}"


def test_an_axis_across_slices_never_mixes_with_those_within(monkeypatch: pytest.MonkeyPatch):
    """Two slices of four: data crosses the slow network, fsdp and tensor stay inside."""
    made: list[np.ndarray] = []

    def keep(devices: np.ndarray, *_: Any, **__: Any) -> None:
        made.append(devices)

    monkeypatch.setattr("telamon.parallel.mesh.Mesh", keep)  # a mesh of devices that do not exist cannot be made
    build_mesh(MeshConfig(fsdp=2, tensor=2, cross_slice=AxisSizes(data=2)), devices=[_Chip(i, i // 4) for i in range(8)])
    slices = np.vectorize(lambda chip: chip.slice_index)(made[0]).reshape(2, 2, 2)
    assert made[0].shape == (2, 2, 1, 1, 1, 2)
    np.testing.assert_array_equal(slices, np.arange(2)[:, None, None] * np.ones((2, 2)))


def test_slices_of_tpu_are_not_one_mesh_without_an_axis_across_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_Chip, "platform", "tpu")
    with pytest.raises(ConfigError, match=r"are in 2 \(by their slice_index\).*mesh\.cross_slice\.data=2"):
        build_mesh(MeshConfig(), devices=[_Chip(i, i // 4) for i in range(8)])


@pytest.mark.xdist_group("mesh")
def test_where_there_are_no_slices_a_process_stands_for_one():
    """One process with eight devices is one slice; asking for two must say so rather than lay them out anyhow."""
    with pytest.raises(
        ConfigError, match=r"cross_slice asks for 2 slices, and the 8 devices are in 1 \(a process counts as a slice here\)"
    ):
        build_mesh(MeshConfig(fsdp=4, cross_slice=AxisSizes(data=2)), devices=jax.devices())
