"""XLA options: whose they are, that they reach the compiler, and that one it does not know is refused by name."""

import jax
import pytest
import tiny

from telamon.config.load import load_run
from telamon.errors import ConfigError
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


def test_an_option_of_the_hardware_that_this_compiler_does_not_take_points_at_the_versions():
    lowered = jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((), "float32"))
    with pytest.raises(ConfigError, match=r"xla_of_another_version=1 of presets/hardware .* constraints\.txt"):
        compile_with(lowered, {"xla_of_another_version": 1}, given={})
