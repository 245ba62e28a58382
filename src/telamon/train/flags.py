"""XLA's options for a run's programs: those of the chip, from `presets/hardware`, and over them those of `train.xla_flags`.

They travel with each compilation, in no variable of the environment, so that whoever compiles a run's step, on a device or for
one that is elsewhere, compiles the same program.
"""

import re
from collections.abc import Mapping
from typing import Any

import jax

from telamon.config.hardware import chip_of_kind
from telamon.config.schema import RunConfig
from telamon.errors import ConfigError

Flags = Mapping[str, bool | int | float | str]

# On a CPU the work is done by XLA's library of products: what LLVM makes around it runs no faster when it is
# optimised for longer (P1's step and the default run's, in turns: 0.98 and 1.00 of the time, and the same bits).
_CPU: Flags = {"xla_backend_optimization_level": 1}


def xla_flags(config: RunConfig, device: Any) -> dict[str, bool | int | float | str]:
    """The options of a run's programs on devices like `device`, by name."""
    chip = chip_of_kind(device.device_kind)
    own = _CPU if device.platform == "cpu" else {} if chip is None else chip.flags
    return {**own, **config.train.xla_flags}


def describe_flags(config: RunConfig, device: Any) -> str:
    """The options in a line, the user's own marked."""
    given = config.train.xla_flags
    listed = [f"{name}={_shown(value)}{' (train.xla_flags)' if name in given else ''}" for name, value in xla_flags(config, device).items()]
    return ", ".join(listed) or "none"


def compile_with(lowered: Any, flags: Flags, *, given: Flags) -> Any:
    """Compile a lowered program.

    Args:
        lowered: a `jax.stages.Lowered`.
        flags: all options.
        given: those of them that are the user's.

    Raises:
        ConfigError: the compiler does not know an option, or not its value.
    """
    try:
        return lowered.compile(compiler_options=dict(flags) or None)
    except jax.errors.JaxRuntimeError as error:
        refused = next((name for name in flags if re.search(rf"option:? '?{name}\b", str(error))), None)
        if refused is None:
            raise
        raise ConfigError(_refusal(refused, flags[refused], error, given=refused in given)) from error


def check_flags(config: RunConfig, device: Any) -> None:
    """Raise ConfigError where the compiler for `device` does not take the user's options: at once, not when the step is compiled."""
    given = config.train.xla_flags
    if given:
        where = jax.sharding.SingleDeviceSharding(device)
        nothing = jax.jit(lambda x: x, out_shardings=where).lower(jax.ShapeDtypeStruct((), "float32", sharding=where))
        compile_with(nothing, given, given=given)


def _refusal(name: str, value: Any, error: Exception, *, given: bool) -> str:
    reason = str(error).splitlines()[0]
    if given:
        return f"train.xla_flags.{name}={_shown(value)} is not taken by this compiler ({reason}); leave it out, or correct it"
    return f"the option {name}={_shown(value)} of presets/hardware is not taken by this compiler ({reason}); install the versions of constraints.txt"


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
