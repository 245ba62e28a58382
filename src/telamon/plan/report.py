"""A plan as people read it: what a device holds, what moves between devices, and what a step should take."""

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from telamon.plan.aot import Compiled
from telamon.plan.plan import Plan, Program
from telamon.watch.log import human_seconds

_PARTS = ("weights", "optimizer", "gradients", "activations", "temporaries", "inputs", "code")
_SHORT = 0.005
"""Seconds of a step below which the prediction is far too good."""
_MATTERS = 0.01
"""Share of all bytes from which on a part is worth lowering."""


def show(plan: Plan, console: Console) -> None:
    """Print a plan."""
    for piece in render(plan):
        console.print(piece, highlight=False)


def render(plan: Plan) -> Iterator[RenderableType]:
    """A plan, piece by piece."""
    yield _facts(_what(plan))
    if plan.not_compiled is not None:
        yield ""
        yield not_compiled_note(plan.not_compiled)
    for program in plan.programs:
        yield ""
        yield _memory(program)
        if program.compiled is not None and program.compiled.fits:
            yield _facts(_compiled(program))
            if program.compiled.collectives:
                yield _collectives(program)
    if any(program.name == "train" for program in plan.programs):
        yield ""
        yield from _prediction(plan)
    yield ""
    yield Text(_verdict(plan), style="green" if plan.fits else "red")


def not_compiled_note(missing: str) -> Text:
    """What stands over figures that a compiler would have given, had it been installed."""
    return Text(f"An estimate by arithmetic: {missing}.", style="yellow")


def _what(plan: Plan) -> dict[str, str]:
    config, train = plan.config, plan.config.train
    devices, where = plan.device_count, "this machine"
    if plan.topology is not None:
        counted = f", {devices} devices" if devices != plan.topology.chip_count else ""
        where = f"{plan.topology.text}: {plan.topology.chip_count} x {plan.topology.chip.name}{counted}"
    axes = " x ".join(f"{axis} {size}" for axis, size in config.mesh.filled(devices).sizes().items() if size > 1) or "1 device"
    across = " x ".join(f"{axis} {size}" for axis, size in config.mesh.cross_slice.sizes().items() if size > 1)
    microbatches = f" in {train.accumulate} microbatches" if train.accumulate > 1 else ""
    return {
        "model": f"{config.model.preset or config.model.family}, {config.model.n_layers} layers",
        "on": where,
        "mesh": axes + (f", across slices {across}" if across else ""),
        "batch": f"{train.batch_size} rows of {train.seq_len} tokens{microbatches}, remat {train.remat}, {train.compute_dtype}",
    }


def _memory(program: Program) -> Table:
    source = "by arithmetic, not compiled" if program.compiled is None or not program.compiled.fits else "of the compiled program"
    shown, limit = program.memory, program.limit
    size, unit = _bytes(shown.total)
    table = Table("memory of a device", unit, "would be lower with", title=f"{program.what}: memory {source}", title_justify="left")
    table.columns[1].justify = "right"
    for part in _PARTS:
        taken = getattr(shown, part)
        if taken or part in ("weights", "activations"):
            table.add_row(_name(program, part), f"{taken / size:.2f}", shown.advice.get(part, "") if taken > _MATTERS * shown.total else "")
    table.add_section()
    table.add_row("in all", f"{shown.total / size:.2f}", "" if limit is None else f"of {limit / 2**30:.2f} GiB that a program may use")
    host = shown.host if program.compiled is None or not program.compiled.fits else program.compiled.host_bytes
    if host:
        table.add_row("beside it, on the host", f"{host / size:.2f}", "offloading, for each device")
    return table


def _bytes(largest: float) -> tuple[int, str]:
    """The unit of a column: its size in bytes, and its name."""
    return (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")


def _name(program: Program, part: str) -> str:
    """Keys and values are what a decoding step keeps."""
    return "cache" if program.name == "decode" and part == "activations" else part


def _compiled(program: Program) -> dict[str, str]:
    compiled, (size, unit) = program.compiled, _bytes(program.memory.total)
    assert compiled is not None
    products = "recomputation included" if program.name == "train" else "in products of matrices (fewer where a device has a single row)"
    return {
        "picked": "; ".join(compiled.attention),
        "kernels": ", ".join(f"{name} x {count}" for name, count in compiled.kernels) or "none: XLA's own",
        "XLA options": compiled.flags,
        "FLOPs": f"{compiled.flops / 1e12:,.4g} T a device and step, {products}",
        "estimate": f"{program.estimate.total / size:.2f} {unit} by arithmetic, {program.estimate.total / program.memory.total - 1:+.0%}",
        "compiled": f"in {human_seconds(compiled.seconds)}, with {compiled.host_peak_bytes / 2**30:.1f} GiB of this host's memory{_unfinished(compiled)}",
    }


def _unfinished(compiled: Compiled) -> str:
    return "; code was not generated, so its size and what is refused with it (kernels) are not known" if compiled.quick else ""


def _collectives(program: Program) -> Table:
    assert program.compiled is not None
    size, unit = _bytes(max(collective.bytes for collective in program.compiled.collectives))
    table = Table(
        "collective", "over", "calls a step", f"{unit} a device and step", title="what moves between devices", title_justify="left"
    )
    for column in table.columns[2:]:
        column.justify = "right"
    for collective in program.compiled.collectives:
        table.add_row(collective.kind, collective.axis, f"{collective.count:,}", f"{collective.bytes / size:.2f}")
    return table


def _prediction(plan: Plan) -> Iterator[RenderableType]:
    prediction = plan.prediction
    if prediction is None:
        yield Text("no prediction of time: the peaks of these devices are in no table")
        return
    scale, unit = (1, "seconds") if prediction.step_seconds >= 1 else (1000, "ms")
    table = Table("predicted", unit, "hidden", title="training step: time, by arithmetic", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, seconds in prediction.parts.items():
        table.add_row(name, f"{seconds * scale:.3f}", "")
    for collective in prediction.collectives:
        name = f"{collective.kind} over {collective.axis}"
        hidden = collective.seconds - collective.exposed
        table.add_row(name, f"{collective.exposed * scale:.3f}", f"{hidden * scale:.3f}")
    table.add_section()
    table.add_row("a step", f"{prediction.step_seconds * scale:.3f}", "")
    yield table
    rate = prediction.tokens_per_second_per_device
    facts = {
        "tokens": f"{rate * plan.device_count:,.0f} a second, {rate:,.0f} a device; MFU {prediction.mfu:.1%}",
        "run": f"{plan.config.train.steps:,} steps in {human_seconds(prediction.step_seconds * plan.config.train.steps)}",
    }
    if prediction.step_seconds < _SHORT:
        facts["but"] = "so short a step waits for its host and for the start of each operation, which this model does not count"
    if plan.price is not None:
        facts["cost"] = str(plan.price)
    yield _facts(facts)
    yield Padding(Text(f"{prediction.rule} {_constants(plan)}", style="dim"), (0, 0, 0, 2))


def _constants(plan: Plan) -> str:
    assert plan.topology is not None
    chip = plan.topology.chip
    shares = ", ".join(f"{name} {getattr(chip, name):g}" for name in ("matmul_share", "attention_share", "hidden_share"))
    return f"{chip.name}: {chip.bf16_tflops:g} TFLOP/s, {chip.hbm_gbps:g} GB/s of memory, {shares}."


def _verdict(plan: Plan) -> str:
    lines = [_outcome(program) for program in plan.programs]
    if plan.saved is not None and plan.fits:
        lines.append(f"the compiled training step is in {plan.saved}; to use it:\n  telamon train RUN --compiled {plan.saved}")
    return "\n".join(lines)


def _outcome(program: Program) -> str:
    free = None if program.limit is None else 1 - program.memory.total / program.limit
    how = "" if program.compiled is not None else ", by arithmetic alone: an estimate, no compiler was asked"
    if program.fits:
        return f"the {program.what} fits{how}" + ("" if free is None else f": {free:.0%} of a device's memory is left")
    why = program.compiled.refusal if program.compiled is not None else None if free is None else f"it needs {-free:.0%} more than there is"
    return f"the {program.what} does not fit{how}: {why}"


def _facts(values: dict[str, str]) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, value in values.items():
        table.add_row(f"  {name}", Text(value))
    return table
