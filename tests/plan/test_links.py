"""Collectives over a topology, against the links counted by hand."""

from dataclasses import replace

import numpy as np
import pytest

from telamon.config.schema import AXES
from telamon.plan.links import Group, groups
from telamon.plan.topology import parse_topology

GB = 1e9


def _groups(text: str, *, link: float = 10, network: float = 1, across: dict[str, int] | None = None, **within: int) -> dict[str, Group]:
    topology = parse_topology(text)
    chip = replace(topology.chip, link_gbps=link, network_gbps=network)
    sizes = [{axis: given.get(axis, 1) for axis in AXES} for given in (within, across or {})]
    return groups(replace(topology, chip=chip), *sizes)


def test_a_ring_gathers_over_the_links_of_both_neighbours():
    ring = _groups("v6e:16x16", fsdp=16, tensor=16)["fsdp"]
    assert ring.gather(32 * GB) == pytest.approx(32 * 15 / 16 / 20)
    assert ring.reduce(32 * GB) == pytest.approx(2 * 32 * 15 / 16 / 20)


def test_a_row_that_is_not_closed_gathers_over_one_link():
    assert _groups("v6e:8x8", fsdp=8, tensor=8)["fsdp"].gather(32 * GB) == pytest.approx(32 * 7 / 8 / 10)


@pytest.mark.parametrize(
    ("machine", "size", "links"),
    [("v6e:16x16", 256, 4), ("v6e:8x16", 128, 3), ("v5e:4x4", 16, 2), ("v5p:4x4x4", 64, 6), ("v5p:2x2x4", 16, 3), ("v4:4x4x8", 128, 6)],
)
def test_an_axis_over_a_whole_slice_uses_every_way_and_rings_only_where_the_slice_is_closed(machine, size, links):
    group = _groups(machine, fsdp=size)["fsdp"]
    assert (group.near, group.far) == (size, 1)
    assert group.gather(32 * GB) == pytest.approx(32 * (size - 1) / size / (10 * links))


def test_axes_that_share_a_way_have_rows_of_it():
    found = _groups("v6e:16x16", fsdp=64, expert=4)
    assert found["fsdp"].gather(32 * GB) == pytest.approx(32 * 63 / 64 / 30)  # a ring of 16 and a row of 4
    assert found["expert"].gather(32 * GB) == pytest.approx(32 * 3 / 4 / 10)


def test_two_devices_of_a_chip_share_its_links_unless_they_gather_together():
    together = _groups("tpu7x:4x4x4", fsdp=128)["fsdp"]
    assert together.gather(32 * GB) == pytest.approx(32 * 127 / 128 / 60)
    apart = _groups("tpu7x:4x4x4", fsdp=64, tensor=2)["fsdp"]
    assert apart.gather(32 * GB) == pytest.approx(32 * 63 / 64 / 30)


def test_slices_are_joined_by_the_network_which_carries_each_device_its_part():
    group = _groups("2*v6e:16x16", fsdp=256, across={"fsdp": 2})["fsdp"]
    assert group.size == 512
    assert group.gather(256 * GB) == pytest.approx(max(256 * 255 / 256 / 40, 1 / 2 / 1))
    data = _groups("2*v6e:16x16", fsdp=256, across={"data": 2})["data"]
    assert data.reduce(3 * GB) == pytest.approx(2 * 3 / 2)


def test_the_inner_axes_of_gpus_stay_in_a_node():
    found = _groups("h100:8x4", link=400, network=50, fsdp=16, tensor=2)
    assert (found["tensor"].near, found["tensor"].far) == (2, 1)
    assert (found["fsdp"].near, found["fsdp"].far) == (4, 4)
    assert found["tensor"].gather(80 * GB) == pytest.approx(80 / 2 / 400)
    assert found["fsdp"].gather(80 * GB) == pytest.approx(max(80 * 3 / 4 / 400, 80 / 4 * 3 / 4 / 50))


def test_an_axis_of_one_device_costs_nothing():
    found = _groups("v5p:4x4x4", fsdp=64)
    for axis in set(AXES) - {"fsdp"}:
        assert found[axis].gather(GB) == found[axis].reduce(GB) == found[axis].exchange(GB) == 0, axis


def test_an_exchange_on_a_ring_pays_for_the_distance():
    n, links, size = 16, 2, 4 * GB
    place = np.arange(n)
    away = np.abs(place[:, None] - place)
    hops = np.minimum(away, n - away).sum(axis=1)  # of the parts that one device sends to the others
    by_hand = size / n * hops[0] / (links * 10 * GB)
    assert _groups("v6e:16x16", fsdp=16, expert=16)["expert"].exchange(size) == pytest.approx(by_hand, rel=1e-9)
