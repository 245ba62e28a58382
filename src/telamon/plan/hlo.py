"""What a compiled program does, counted from its text: the scheduled HLO of one device.

The compiler's own cost analysis counts the body of a loop once and knows nothing of mesh axes, so the text is read here.

- An instruction counts as often as the loops around it run: the loop's ``known_trip_count``, or where the compiler gives none
  (TPU), what its condition compares the counter with. A loop whose end is known only when it runs (decoding) counts once. Of
  the branches of a conditional all are counted.
- **FLOPs** are those of dots and convolutions, in fusions too, two for each product of two numbers. TPU's compiler writes
  dots as convolutions, batched ones with windows that mostly lie on padding or between dilated elements: only places where the
  window meets an element are products. cuBLAS's calls count as the dots they are. cuDNN's attention counts two products forward
  and five backward, causal ones half of the square or their window of it; a Pallas kernel counts as what it states of itself.
- **Collectives** are given with the mesh axes that their groups span, and with the bytes that a device holds of the whole:
  of the result for an all-gather, of the operand for the others. A ragged all-to-all counts the rows that it has room for, of its first
  operand alone: how many it sends is in numbers, where it puts them is what the others say. A permute counts what it sends; products whose gathering is
  hidden in a ring of them (windowed einsum) therefore count as permutes. An asynchronous one counts where it starts, also where
  TPU's compiler spreads it over several fusions; an all-reduce of which a fusion keeps a part only is a reduce-scatter. Slices of
  TPU talk through their hosts, by sends that say which collective they are a part of.
- **Kernels** are calls of what somebody wrote by hand: Pallas, cuDNN, cuBLAS, Triton.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from telamon.plan.hlo_text import Computation, Instruction, Module, array_shapes, byte_size, parse

_COLLECTIVES = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_IOTA = r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
_KERNELS = re.compile(r"tpu_custom_call|mosaic|triton|__cudnn|__cublas")


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind over the same axes, in one run of the program on one device."""

    kind: str
    """Such as ``all-gather``."""
    axis: str
    """Mesh axes that the groups span, joined by ``+``."""
    bytes: int
    """Bytes a device holds of the whole, all calls together (see the head of this file)."""
    count: int
    """Calls."""


@dataclass(frozen=True)
class Program:
    """What one run of a program does on one device."""

    flops: int
    collectives: tuple[Collective, ...]
    """The most bytes first."""
    kernels: tuple[tuple[str, int], ...]
    """(name, calls), by name."""


def count_program(text: str, axes: Mapping[str, int], *, across: Mapping[str, int] | None = None) -> Program:
    """Count the FLOPs, collectives and kernels of a compiled program.

    Args:
        text: the scheduled HLO, as `jax.stages.Compiled.as_text` gives it.
        axes: names and sizes of the mesh, in the order of its devices.
        across: of several slices of TPU, how often each axis is repeated across them.
    """
    module = parse(text)
    total = _Reader(module, axes, across or {}).count(module.entry)
    moved = (Collective(kind, axis, total.bytes[kind, axis], count) for (kind, axis), count in total.calls.items())
    return Program(total.flops, tuple(sorted(moved, key=lambda found: (-found.bytes, found.kind))), tuple(sorted(total.kernels.items())))


@dataclass
class _Count:
    flops: int = 0
    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)

    def add(self, other: "_Count", times: int = 1) -> None:
        self.flops += other.flops * times
        _add_times(self.bytes, other.bytes, times)
        _add_times(self.calls, other.calls, times)
        _add_times(self.kernels, other.kernels, times)


def _add_times[K](mine: Counter[K], others: Counter[K], times: int) -> None:
    for key, value in others.items():
        mine[key] += value * times


class _Reader:
    def __init__(self, module: Module, axes: Mapping[str, int], across: Mapping[str, int]) -> None:
        self._module = module
        self._across = {name: size for name, size in across.items() if size > 1}
        # A program of one slice numbers the slice's devices.
        apart = module.partitions < math.prod(axes.values())
        self._axes = {name: size // (self._across.get(name, 1) if apart else 1) for name, size in axes.items()}
        self._counts: dict[str, _Count] = {}

    def count(self, name: str) -> _Count:
        """What one run of a computation does, with all it calls."""
        if name not in self._counts:
            computation, total = self._module.computations[name], _Count()
            for instruction in computation.values():
                self._add(total, instruction, computation, scatters=name.startswith("all-reduce-scatter"))
            self._counts[name] = total
        return self._counts[name]

    def _add(self, total: _Count, op: Instruction, computation: Computation, *, scatters: bool) -> None:
        # An asynchronous operation is what its name says where it starts, and nothing where it is waited for.
        opcode = op.opcode.removesuffix("-start")
        if opcode in _COLLECTIVES:
            if not _continues(op, computation):
                self._add_collective(total, "reduce-scatter" if scatters and opcode == "all-reduce" else opcode, op, computation)
        elif opcode == "dot":
            total.flops += dot_flops(op, computation)
        elif opcode == "convolution":
            total.flops += convolution_flops(op, computation)
        elif opcode == "custom-call":
            _add_kernel(total, op, computation)
            for called in op.called:  # TPU's sparse cores run collectives this way
                total.add(self.count(called))
        elif opcode == "while":
            total.add(self.count(op.name_of("body")), times=trip_count(op, computation, self._module))
        elif opcode == "send" and (between_slices := op.text("_xla_megascale_transfer_type")):
            self._add_moved(total, between_slices.lower().replace("_", "-"), self._across, computation[op.operands[0]].shape)
        elif opcode in ("fusion", "call", "conditional", "async"):
            for called in op.called:
                total.add(self.count(called))

    def _add_collective(self, total: _Count, kind: str, op: Instruction, computation: Computation) -> None:
        group = first_group(op, math.prod(self._axes.values()))
        places = np.array(np.unravel_index(group, tuple(self._axes.values())))
        spanned = {name: len(set(along.tolist())) for name, along in zip(self._axes, places, strict=True)}
        sent = op.operands[:1] if kind == "ragged-all-to-all" else op.operands
        shape = " ".join(computation[operand].shape for operand in sent)
        self._add_moved(total, kind, {name: size for name, size in spanned.items() if size > 1}, shape)

    def _add_moved(self, total: _Count, kind: str, spanned: Mapping[str, int], shape: str) -> None:
        """`spanned` gives, for each axis that a group extends along, how many places of it."""
        if spanned:
            axis = "+".join(spanned)
            total.bytes[kind, axis] += byte_size(shape) * (math.prod(spanned.values()) if kind == "all-gather" else 1)
            total.calls[kind, axis] += 1


def _continues(op: Instruction, computation: Computation) -> bool:
    """Whether this is a later part of a collective that is spread over several fusions: only the first of them starts it."""
    if "async_collective_fusion_config" not in op.attributes:
        return False
    return not any(other.text("custom_call_target") == "AsyncCollectiveStart" for other in computation.values())


def _add_kernel(total: _Count, op: Instruction, computation: Computation) -> None:
    target = op.text("custom_call_target")
    if _KERNELS.search(target):
        if target.startswith("__cublas"):
            total.flops += _cublas_flops(op, computation)
        else:
            total.flops += _fmha_flops(op, target) if target.startswith("__cudnn$fmha") else _stated_flops(op)
        total.kernels[_kernel_name(op, target)] += 1


def _kernel_name(op: Instruction, target: str) -> str:
    """That of a Pallas or Triton kernel, which its instruction bears, else that of the library's function."""
    own = re.sub(r"(\.(clone|\d+))+$", "", op.name)
    return own if own != "custom-call" and not target.startswith("__cu") else target


def _stated_flops(op: Instruction) -> int:
    return int(op.find(r'"cost_estimate":\{[^}]*"flops":"(\d+)"') or 0)


def _fmha_flops(op: Instruction, target: str) -> int:
    """FLOPs of cuDNN's attention: the scores' shape [B, N, T, S] is in its settings, the size of a head last in its first result."""
    scores = [int(size) for size in re.findall(r"\d+", op.find(r'"intermediate_tensor_shape":.*?"dimensions": ?\[([^\]]*)\]') or "")]
    head = array_shapes(op.shape)[0][1][-1]
    products = 5 if "Backward" in target else 2
    window = int(op.find(r'"sliding_window_length": ?(\d+)') or 0)
    if window:
        scores[-1] = min(window, scores[-1])
    causal = "CAUSAL" in (op.find(r'"mask_type": ?"(\w+)"') or "") and not window
    return products * 2 * math.prod(scores) * head // (2 if causal else 1)


def dot_flops(op: Instruction, computation: Computation) -> int:
    """FLOPs of a dot: two for each element of the result and each place contracted."""
    left = array_shapes(computation[op.operands[0]].shape)[0][1]
    return 2 * math.prod(array_shapes(op.shape)[0][1]) * math.prod(left[dim] for dim in op.numbers("lhs_contracting_dims"))


def _cublas_flops(op: Instruction, computation: Computation) -> int:
    found = op.find(r'"lhs_contracting_dimensions":\s*(\[[^\]]*\])')
    left = array_shapes(computation[op.operands[0]].shape)[0][1]
    result = array_shapes(op.shape)[0][1]
    return 2 * math.prod(result) * math.prod(left[int(dim)] for dim in json.loads(found or "[]"))


def convolution_flops(op: Instruction, computation: Computation) -> int:
    """FLOPs of a convolution: two for each product of an element of the input and one of the window, padding and holes left out."""
    labels = op.word("dim_labels")
    left_labels, right_labels, out_labels = re.split("_|->", labels)
    left = dict(zip(left_labels, array_shapes(computation[op.operands[0]].shape)[0][1], strict=True))
    right = dict(zip(right_labels, array_shapes(computation[op.operands[1]].shape)[0][1], strict=True))
    out = dict(zip(out_labels, array_shapes(op.shape)[0][1], strict=True))
    spatial = sorted(label for label in out if label.isdigit())
    window = _window(op, len(spatial))
    met = math.prod(_meetings(left[dim], right[dim], out[dim], *along) for dim, along in zip(spatial, window, strict=True))
    # The window's own "i" is already the share of one feature group; a batch group meets its share of the rows.
    return 2 * out["b"] * out["f"] * right["i"] * met


def _window(op: Instruction, dims: int) -> list[tuple[int, int, int, int]]:
    """For each spatial dim (stride, low padding, dilation of the input, dilation of the window)."""
    found = dict(re.findall(r"(\w+)=([\dx_-]+)", op.find(r"window=\{([^}]*)\}") or ""))

    def of(key: str, default: int) -> list[int]:
        # Padding is written low_high; numbers may be negative.
        return [int(part.split("_")[0]) for part in found[key].split("x")] if key in found else [default] * dims

    return list(zip(of("stride", 1), of("pad", 0), of("lhs_dilate", 1), of("rhs_dilate", 1), strict=True))


def _meetings(size: int, window: int, out: int, stride: int, pad: int, dilation: int, window_dilation: int) -> int:
    """How many pairs of a place of the result and one of the window fall on an element of the input."""
    place = np.arange(out)[:, None] * stride - pad + np.arange(window) * window_dilation
    return int(np.count_nonzero((place >= 0) & (place % dilation == 0) & (place < size * dilation)))


def first_group(op: Instruction, devices: int) -> list[int]:
    """The devices (by their place in the mesh) of a collective's first group, in whichever of the ways it is written."""
    if pairs := op.find(r"source_target_pairs=\{(\{[^=]*\})\}"):
        moves = [(int(source), int(end)) for source, end in re.findall(r"\{(\d+),(\d+)\}", pairs)]
        return _ring([(source, end) for source, end in moves if source != end])
    if found := op.find(r"replica_groups=(mesh\[.*?\](?:, ?device_ids=\(.*?\))? ?\{.*?\})"):
        return _mesh_group(found)
    if found := op.find(r"replica_groups=(\[[\d,]+\]<=\S*)"):
        return _iota(found)[0].tolist()
    listed = op.find(r"replica_groups=\{\{([\d,]*)\}")
    return list(map(int, listed.split(","))) if listed else list(range(devices))


def _ring(moves: list[tuple[int, int]]) -> list[int]:
    """The devices that data of one of them reach, following the moves."""
    after: dict[int, int] = dict(moves)
    reached = [moves[0][0]] if moves else []
    while reached and (step := after.get(reached[-1])) is not None and step not in reached:
        reached.append(step)
    return reached


def _iota(text: str) -> np.ndarray:
    """`[2,4]<=[4,2]T(1,0)`: the numbers from 0 in the second shape, its dims permuted, read as rows of the first."""
    shape, dims, order = (_sizes(part) for part in re.findall(_IOTA, text)[0])
    numbers = np.arange(math.prod(dims)).reshape(dims)
    return (numbers.transpose(order) if order else numbers).reshape(shape)


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",") if size]


def _mesh_group(text: str) -> list[int]:
    """`mesh['a'=2,'b'=4], device_ids=(...) {'b'}`: groups along named axes, or along a part of one, `'b':(2)2`."""
    head, _, wanted = text.rpartition("{")
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", head)}
    ids = re.search(r"device_ids=\((.*)\)", head)
    if ids is None:
        numbers = np.arange(math.prod(sizes.values()))
    else:
        numbers = _iota(ids[1]) if "<=" in ids[1] else np.array([int(number) for number in re.findall(r"\d+", ids[1])])
    places = (_kept(size, name, wanted) for name, size in sizes.items())
    return numbers.reshape(tuple(sizes.values()))[np.ix_(*places)].ravel().tolist()


def _kept(size: int, name: str, wanted: str) -> list[int]:
    """The places along an axis that the group of its first place takes in."""
    found = re.search(rf"'{re.escape(name)}'(?::\((\d+)\)(\d+))?", wanted)
    if not found:
        return [0]
    if not found[1]:
        return list(range(size))
    before, part = int(found[1]), int(found[2])
    return [place * (size // before // part) for place in range(part)]


def trip_count(op: Instruction, computation: Computation, module: Module) -> int:
    """How often a loop runs; 1 where that is known only when it runs."""
    if known := op.find(r'"known_trip_count":\{"n":"(\d+)"\}'):
        return int(known)
    condition, body = module.computations[op.name_of("condition")], module.computations[op.name_of("body")]
    compare, end = _compared(condition, module)
    if compare is None or end is None:
        return 1
    start = _start(op, compare, computation)
    step = _step(body, compare)
    return max(0, math.ceil((end - start) / step))


def _roots(computation: Computation) -> Iterator[Instruction]:
    return (instruction for instruction in computation.values() if instruction.root)


def _compared(condition: Computation, module: Module) -> tuple[int | None, int | None]:
    """Which part of the loop's state is compared, and the number it has to stay below."""
    root = next(_roots(condition))
    direction, operands = root.word("direction"), [condition[name] for name in root.operands]
    if root.opcode == "fusion":  # the comparison itself stands in the fusion, on its parameters in their order
        inner = module.computations[root.called[0]]
        compare = next(_roots(inner))
        direction = compare.word("direction")
        places = [int(inner[name].literal) if inner[name].opcode == "parameter" else None for name in compare.operands]
        operands = [inner[name] if place is None else operands[place] for name, place in zip(compare.operands, places, strict=True)]
    if direction not in ("LT", "LE") or len(operands) != 2 or operands[1].opcode != "constant":
        return None, None
    counter = operands[0]
    while counter.opcode in ("copy", "bitcast", "convert"):
        counter = condition[counter.operands[0]]
    if counter.opcode != "get-tuple-element" or not re.fullmatch(r"-?\d+", operands[1].literal):  # a loop until something is small
        return None, None
    return int(counter.word("index")), int(operands[1].literal) + (direction == "LE")


def _start(loop: Instruction, place: int, computation: Computation) -> int:
    """What the counter holds before the loop; 0 where the text does not say."""
    state = computation[loop.operands[0]]
    value = _source(computation, state.operands[place]) if state.opcode == "tuple" else None
    return int(value.literal) if value is not None and value.opcode == "constant" else 0


def _step(body: Computation, place: int) -> int:
    """What a turn adds to the counter; 1 where the text does not say."""
    root = next(_roots(body))
    if root.opcode != "tuple":
        return 1
    added = _source(body, root.operands[place])
    numbers = [value for name in added.operands if added.opcode == "add" and (value := _source(body, name)).opcode == "constant"]
    return int(numbers[0].literal) if numbers else 1


def _source(computation: Computation, name: str) -> Instruction:
    instruction = computation[name]
    while instruction.opcode in ("copy", "bitcast", "convert") and instruction.operands:
        instruction = computation[instruction.operands[0]]
    return instruction
