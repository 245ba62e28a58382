"""Names of machines, against the shapes that Google's and NVIDIA's documentation give for them."""

import subprocess
import sys

import pytest

from telamon.errors import ConfigError, MissingCompiler
from telamon.plan import topology
from telamon.plan.topology import compiler_environment, parse_topology, require_compiler


@pytest.mark.parametrize(
    ("text", "name", "chips", "devices_per_slice", "devices"),
    [
        ("v5e:4x4", "v5e:4x4", 16, 16, 16),
        ("V6E:16x16", "v6e:16x16", 256, 256, 256),
        ("v5p:8x8x4", "v5p:8x8x4", 256, 256, 256),
        ("2*v5p:4x4x4", "2*v5p:4x4x4", 128, 64, 128),
        ("tpu7x:2x2x1", "tpu7x:2x2x1", 4, 8, 8),  # a chip is two devices
        ("v4:2x2x1", "v4:2x2x1", 4, 4, 4),
        ("h100:8", "h100:8", 8, 8, 8),
        ("h100:8x4", "h100:8x4", 32, 8, 32),
        ("4*h100:8", "h100:8x4", 32, 8, 32),
        ("a100-40gb:8x2", "a100-40gb:8x2", 16, 8, 16),
        ("v5e-1", "v5e:1x1", 1, 1, 1),
        ("v6e-8", "v6e:2x4", 8, 8, 8),
        ("v6e-128", "v6e:8x16", 128, 128, 128),
        ("v4-8", "v4:2x2x1", 4, 4, 4),  # short names of v4, v5p and tpu7x count TensorCores
        ("v5p-64", "v5p:2x4x4", 32, 32, 32),
        ("v5p-512", "v5p:4x8x8", 256, 256, 256),
        ("tpu7x-128", "tpu7x:4x4x4", 64, 128, 128),
        ("2*v6e-256", "2*v6e:16x16", 512, 256, 512),
        ("v5litepod-16", "v5e:4x4", 16, 16, 16),  # what the cloud calls a v5e
    ],
)
def test_a_name_says_how_many_chips_and_devices(text, name, chips, devices_per_slice, devices):
    found = parse_topology(text)
    assert (found.text, found.chip_count, found.devices_per_slice, found.device_count) == (name, chips, devices_per_slice, devices)
    assert parse_topology(found.text) == found


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("v7e:4x4", "did you mean 'v6e'"),
        ("v6e", "written like v6e:4x4"),
        ("0*v6e:4x4", "written like"),
        ("v6e:4by4", "written like"),
        ("v6e:3x3", "v6e:2x4 and v6e:4x4"),
        ("v6e:32x32", "near it are v6e:16x16"),  # libtpu does not refuse this one: it dies of it
        ("v5p:4x4", "3 sizes, up to 16x20x28.* v5p:2x2x4 and v5p:2x4x4"),
        ("v5p:1x2x2", "v5p:2x2x1"),
        ("v6e-24", "counts chips; near it are v6e-16 and v6e-32"),
        ("v5p-7", "TensorCores, two a chip; near it are v5p-2 and v5p-8"),
        ("h100:32", "h100:8x4 for 32"),
        ("h100:8x2x2", "h100:8x4 for 32"),
        ("99999*h100:8x99999", "times the nodes"),
        (f"v6e-{'9' * 5000}", "written like"),  # Python reads no number of so many digits
        (f"{10**17}*v6e:4x4", "written like"),  # a search would go through its divisors
    ],
)
def test_another_name_is_answered_with_the_nearest(text, says):
    with pytest.raises(ConfigError, match=says):
        parse_topology(text)


@pytest.mark.parametrize(("text", "package"), [("v6e:4x4", "pip install libtpu"), ("h100:8", "pip install jax-cuda13-plugin")])
def test_without_the_compiler_the_package_is_named(text, package, monkeypatch):
    monkeypatch.setattr(topology, "find_spec", lambda name: None)
    with pytest.raises(MissingCompiler, match=package) as caught:
        require_compiler(parse_topology(text))
    assert caught.value.exit_code == 2


_SHOW_MESHES = """
import sys
from telamon.config.schema import AxisSizes, MeshConfig
from telamon.parallel.mesh import build_mesh
from telamon.plan.topology import aot_devices, parse_topology

for text in sys.argv[1:]:
    topology = parse_topology(text)
    devices = aot_devices(topology)
    # Axes of 2 divide a torus's sides of 4, too.
    mesh = build_mesh(MeshConfig(tensor=2, cross_slice=AxisSizes(data=topology.slices)), devices=devices)
    part = "slice_index" if topology.chip.platform == "tpu" else "process_index"
    apart = [{getattr(device, part, 0) for device in row.flat} for row in mesh.devices]
    mixed = any(len(parts) > 1 for parts in apart)
    print(text, len(devices), mesh.shape["data"], mesh.shape["fsdp"], mixed, devices[0].device_kind, sep="|")
"""


@pytest.mark.parametrize(
    ("platform", "expected"),
    [
        ("libtpu", ["v4:2x2x1|4|1|2|False|TPU v4", "2*v5p:4x4x4|128|2|32|False|TPU v5", "2*tpu7x:2x2x1|16|2|4|False|TPU7x"]),
        ("jax_plugins.xla_cuda13", ["h100:8x4|32|4|4|False|NVIDIA H100 80GB HBM3", "b200:4|4|1|2|False|NVIDIA B200"]),
    ],
)
def test_the_compilers_devices_are_as_many_and_make_a_mesh(platform, expected):
    """In a process of its own: a compiler is loaded once, with an environment that other tests must not see."""
    pytest.importorskip(platform.partition(".")[0])
    if not topology.find_spec(platform):
        pytest.skip(f"{platform} is not installed")
    names = [line.partition("|")[0] for line in expected]
    result = _run(*names)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.splitlines() == expected
    assert "Traceback" not in result.stderr


def _run(*names: str) -> "subprocess.CompletedProcess[str]":
    import os

    environment = {**os.environ, **compiler_environment(parse_topology(names[0]))}
    return subprocess.run([sys.executable, "-c", _SHOW_MESHES, *names], capture_output=True, text=True, env=environment, timeout=120)
