"""XLA options: whose they are, that they reach the compiler, and that one it does not know is refused by name."""

import os
import subprocess
import sys

import jax
import pytest
import tiny

from telamon.config.hardware import chips
from telamon.config.load import load_run
from telamon.errors import ConfigError, MissingCompiler
from telamon.plan.topology import compiler_environment, parse_topology, require_compiler
from telamon.train.flags import compile_with, describe_flags, xla_flags
from telamon.train.job import make_job


class Device:
    def __init__(self, platform: str, device_kind: str):
        self.platform, self.device_kind = platform, device_kind


def test_a_users_option_comes_before_that_of_the_hardware_and_says_whose_it_is():
    config = load_run("tiny", ["train.xla_flags.xla_backend_optimization_level=3", "train.xla_flags.xla_cpu_use_acl=true"]).config
    device = jax.devices()[0]
    assert xla_flags(tiny.run(), device) == {"xla_backend_optimization_level": 1}
    assert xla_flags(config, device) == {"xla_backend_optimization_level": 3, "xla_cpu_use_acl": True}
    assert describe_flags(config, device) == ("xla_backend_optimization_level=3 (train.xla_flags), xla_cpu_use_acl=true (train.xla_flags)")


def test_a_device_that_is_not_known_has_the_users_options_only():
    device = Device("gpu", "NVIDIA Unheard")
    assert describe_flags(tiny.run(), device) == "none"
    assert xla_flags(tiny.run(xla_flags={"xla_dump_to": "here"}), device) == {"xla_dump_to": "here"}


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"xla_cpu_no_such_option": True}, "train.xla_flags.xla_cpu_no_such_option=true is not taken"),
        ({"xla_backend_optimization_level": "fast"}, "train.xla_flags.xla_backend_optimization_level=fast is not taken"),
    ],
)
def test_an_option_that_the_compiler_does_not_take_is_refused_before_anything_is_read(flags, named):
    with pytest.raises(ConfigError, match=named):
        make_job(tiny.run(xla_flags=flags), devices=jax.devices()[:1])


@pytest.mark.parametrize(
    ("text", "value", "kind"), [("null", "none", "none"), ("[1]", r"\[1\]", "a list"), ("{a: 1}", "{a: 1}", "a section")]
)
def test_what_is_no_value_of_an_option_is_refused_by_its_own_name(text, value, kind):
    with pytest.raises(ConfigError, match=rf"^train\.xla_flags\.xla_any={value} .*must be true or false, a number, or text, not {kind}$"):
        load_run("tiny", [f"train.xla_flags.xla_any={text}"])
    for key in ("train.int", "bool"):
        with pytest.raises(ConfigError, match=f"unknown key {key}"):
            load_run("tiny", [f"{key}=1"])


def test_an_option_of_the_hardware_that_this_compiler_does_not_take_points_at_the_versions():
    lowered = jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((), "float32"))
    with pytest.raises(ConfigError, match=r"xla_of_another_version=1 of presets/hardware .* constraints\.txt"):
        compile_with(lowered, {"xla_of_another_version": 1}, given={})


_COMPILE = """
import sys
import jax
from telamon.config.schema import RunConfig
from telamon.plan.topology import aot_devices, parse_topology
from telamon.train.flags import compile_with, xla_flags

for text in sys.argv[1:]:
    device = aot_devices(parse_topology(text))[0]
    where = jax.sharding.SingleDeviceSharding(device)
    lowered = jax.jit(lambda x: x + 1, out_shardings=where).lower(jax.ShapeDtypeStruct((8, 128), "float32", sharding=where))
    flags = xla_flags(RunConfig(), device)
    compile_with(lowered, flags, given={})
    print(text, len(flags), sep="|")
"""
_SMALLEST = {"v4": "2x2x1", "v5p": "2x2x1", "tpu7x": "2x2x1", "v5e": "2x2", "v6e": "2x2"}


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_every_option_of_the_hardwares_presets_is_taken_by_its_compiler(platform):
    """In a process of its own: a compiler is loaded once, with an environment that other tests must not see."""
    there = {f"{chip.key}:{_SMALLEST.get(chip.key, '1')}": len(chip.flags) for chip in chips() if chip.platform == platform}
    topology = parse_topology(next(iter(there)))
    try:
        require_compiler(topology)
    except MissingCompiler as missing:
        pytest.skip(str(missing))
    environment = {**os.environ, **compiler_environment(topology)}
    done = subprocess.run([sys.executable, "-c", _COMPILE, *there], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [f"{text}|{count}" for text, count in there.items()]
