"""MaxText's training command for a model of given sizes, on CPU with synthetic data."""

import shlex
from collections.abc import Sequence

from benchmarks.peers import MAXTEXT, python_of
from benchmarks.processes import Program

STEP = r"completed step: \d+"

ENV = {"DECOUPLE_GCLOUD": "TRUE", "JAX_PLATFORMS": "cpu"}

MODULE = "maxtext.trainers.pre_train.train"

COMMON = (
    "hardware=cpu",
    "skip_jax_distributed_system=true",
    "dataset_type=synthetic",
    "decoder_block=llama2",
    "weight_dtype=float32",
    "attention=dot_product",
    "enable_checkpointing=false",
    "log_period=1",
    "run_name=bench",
)


def program(name: str, settings: Sequence[str], *, output: str, steps: int) -> Program:
    """MaxText with `settings` (its own `key=value`), writing below the folder `output`."""
    arguments = [*COMMON, *settings, f"steps={steps}", f"base_output_directory={output}", f"jax_cache_dir={output}/jax_cache"]
    return Program(name, [python_of(MAXTEXT), "-m", MODULE, *arguments], STEP, ENV)


def shown(settings: Sequence[str]) -> str:
    """The command as a person would type it in MaxText's environment."""
    variables = " ".join(f"{name}={value}" for name, value in ENV.items())
    return f"{variables} python -m {MODULE} {shlex.join([*COMMON, *settings])} base_output_directory=OUT steps=1000"
