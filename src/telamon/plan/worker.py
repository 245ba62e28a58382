"""The process that compiles: `python -m telamon.plan.worker REQUEST`, started by `telamon.plan.aot`.

REQUEST is a JSON file with what `compile_program` was asked for. The answer goes to the file named there: a `Compiled`,
or an error for the user, or where the compiler was stopped once memory was assigned, what this process knows of that program.
"""

import json
import re
import resource
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from telamon.errors import ConfigError, TelamonError
from telamon.plan.child import die_with_parent

if TYPE_CHECKING:
    from telamon.plan.aot import Compiled
    from telamon.train.job import Job

_START = time.monotonic()

_LISTED = 3
"""Largest allocations that a refusal repeats."""


def main(request: str) -> None:
    """Do what a request says, and write its answer."""
    wanted = json.loads(Path(request).read_text(encoding="utf-8"))
    die_with_parent(wanted["parent"])
    # Last, so that nothing there is taken for a package: modules of `run.imports` may stand beside the parent's script.
    sys.path += [place for place in wanted["path"] if place not in sys.path]
    try:
        answer = _answer(wanted).to_json()
    except TelamonError as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    Path(wanted["reply"]).write_text(json.dumps(answer), encoding="utf-8")


def _answer(wanted: dict[str, Any]) -> "Compiled":
    import jax

    from telamon.config.load import load_run
    from telamon.kernels.picks import noted
    from telamon.plan.saved import uncached
    from telamon.plan.topology import aot_devices, parse_topology
    from telamon.train.job import make_job

    config = load_run(wanted["config"]).config
    job = make_job(config, devices=None if wanted["topology"] is None else aot_devices(parse_topology(wanted["topology"])))
    # Not `set_mesh`: operations that run while tracing would go to devices that do not exist.
    saving = uncached() if wanted["save"] else nullcontext()
    with jax.sharding.use_abstract_mesh(job.mesh.abstract_mesh), noted() as picks, saving:
        lowered = _lowered(job, wanted)
        paths = tuple(map(str, picks))
        try:
            compiled = _compiled(lowered, job, paths, wanted)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return _refused(str(error), job, paths)
        if wanted["save"]:
            _save(job, compiled, wanted["save"])
    return _fitting(compiled, job, paths)


def _lowered(job: "Job", wanted: dict[str, Any]) -> Any:
    if wanted["program"] == "train":
        from telamon.plan.saved import step_rows

        return job.lowered("train", max(step_rows(job.config)))
    from telamon.infer.engine import lower_decode

    return lower_decode(job.model, job.mesh, rows=wanted["batch"], length=wanted["context"])


def _compiled(lowered: Any, job: "Job", paths: tuple[str, ...], wanted: dict[str, Any]) -> Any:
    """The compiled program; or this process ends before."""
    from telamon.plan.assigned import dump_options, ends_when_assigned
    from telamon.train.flags import compile_with

    def known() -> dict[str, Any]:
        across = job.config.mesh.cross_slice.sizes()
        return {"circumstances": _circumstances(job, paths), "axes": dict(job.mesh.shape), "across": across}

    if wanted["dump"]:
        dump = Path(wanted["dump"])
        # A compiler that does not know the options refuses them at once.
        with suppress(ConfigError), ends_when_assigned(dump, Path(wanted["reply"]), known):
            return compile_with(lowered, {**dump_options(dump), **job.flags}, given=job.config.train.xla_flags)
    return job.compiled(lowered)


def _save(job: "Job", largest: Any, path: str) -> None:
    from telamon.plan.saved import save_programs, step_rows

    *others, most = step_rows(job.config)
    save_programs(job, {most: largest, **{rows: job.compiled(job.lowered("train", rows)) for rows in others}}, path)


def _fitting(compiled: Any, job: "Job", paths: tuple[str, ...]) -> "Compiled":
    from telamon.config.hardware import chip_of_kind
    from telamon.plan.aot import Compiled, too_large
    from telamon.plan.hlo import count_program

    memory = compiled.memory_analysis()
    counted = count_program(compiled.as_text(), job.mesh.shape, across=job.config.mesh.cross_slice.sizes())
    argument, output, alias, temp, code = (
        getattr(memory, f"{part}_size_in_bytes") for part in ("argument", "output", "alias", "temp", "generated_code")
    )
    host = sum(getattr(memory, f"host_{part}_size_in_bytes") for part in ("argument", "output", "temp"))
    peak, chip = argument + output - alias + temp + code, chip_of_kind(job.mesh.devices.flat[0].device_kind)
    refusal = too_large(peak, chip) if chip is not None and chip.platform == "gpu" else None
    return Compiled(
        argument_bytes=argument,
        output_bytes=output,
        alias_bytes=alias,
        temp_bytes=temp,
        code_bytes=code,
        host_bytes=host - memory.host_alias_size_in_bytes,
        peak_bytes=peak,
        fits=refusal is None,
        refusal=refusal,
        flops=counted.flops,
        collectives=counted.collectives,
        kernels=counted.kernels,
        **_circumstances(job, paths),
    )


def _refused(message: str, job: "Job", paths: tuple[str, ...]) -> "Compiled":
    from telamon.plan.aot import Compiled

    needed, refusal = read_refusal(message)
    nothing = dict.fromkeys(("argument_bytes", "output_bytes", "alias_bytes", "temp_bytes", "code_bytes", "host_bytes", "flops"), 0)
    return Compiled(**nothing, peak_bytes=needed, fits=False, refusal=refusal, collectives=(), kernels=(), **_circumstances(job, paths))


def _circumstances(job: "Job", paths: tuple[str, ...]) -> dict[str, Any]:
    from telamon.train.flags import describe_flags
    from telamon.watch.environment import package_versions

    kilobyte = 1 if sys.platform == "darwin" else 1024  # getrusage counts in bytes there
    return {
        "attention": paths,
        "seconds": time.monotonic() - _START,
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilobyte,
        "versions": package_versions(),
        "flags": describe_flags(job.config, job.mesh.devices.flat[0]),
        "device_kind": job.mesh.devices.flat[0].device_kind,
        "device_count": job.mesh.size,
    }


def read_refusal(message: str) -> tuple[int, str]:
    """The bytes that a program needs and the reason, out of a compiler's words.

    TPU's compiler says either what the temporaries take, before it places anything, or what it has placed, with the largest allocations.
    """
    units = {"B": 0, "K": 1, "M": 2, "G": 3, "T": 4}
    found = re.search(r"(?:\(|Used )([\d.]+)([KMGT]?)(?:B|i?B)?\)? (?:exceeds|of)", message)
    needed = int(float(found[1]) * 1024 ** units[found[2] or "B"]) if found else 0
    first = next(line for line in message.splitlines() if line.strip())
    reason = re.sub(r"^(RESOURCE_EXHAUSTED: |E\d+: |\w+Oom: )+", "", first.strip())
    sizes = re.findall(r"Size: ([\d.]+[KMGT]?)[^\n]*\n(?:\s*Operator: op_name=\"([^\"]*)\")?(?:[^\n]*\n)*?\s*Shape: (\S+)", message)
    largest = "; ".join(f"{size} {shape}{f' of {operator}' if operator else ''}" for size, operator, shape in sizes[:_LISTED])
    return needed, reason + (f" The largest allocations: {largest}" if largest else "")


if __name__ == "__main__":
    main(sys.argv[1])
