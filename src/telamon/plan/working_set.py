"""What a program keeps at one time, read from its jaxpr: an estimate of a compiler's temporaries that takes no compiler.

The rule: values are made in the order of the jaxpr and freed after their last use. What a compiler fuses into its readers
(elementwise operations, broadcasts, changes of shape and type, slices) takes no memory, unless a product, a loop or a kernel
reads it, for these read from memory; until then it keeps alive what it was made from. A fused result takes the place of an
operand of its size that is not read again. A loop takes what it carries and stacks, and its body's peak.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

ROWS = 1009
"""Rows of a traced batch. A prime: an array whose size it divides grows with the rows, every other one is fixed."""

_VIEWS = {"reshape", "squeeze", "expand_dims", "transpose", "copy", "optimization_barrier", "sharding_constraint"}
_CALLED = {"scan", "while", "cond"}
_FROM_MEMORY = _CALLED | {
    *("dot_general", "conv_general_dilated", "ragged_dot_general", "gather", "scatter", "scatter-add", "sort", "top_k"),
    *("pallas_call", "custom_call", "ffi_call"),
    *("all_gather", "reduce_scatter", "psum", "psum_invariant", "pmax", "all_to_all", "ragged_all_to_all", "ppermute"),
}
"""Operations that read what they are given from memory."""
_TO_MEMORY = _FROM_MEMORY | {
    *("reduce_sum", "reduce_max", "reduce_min", "argmax", "argmin", "cumsum", "cumlogsumexp", "cumprod", "cummax"),
    *("concatenate", "dynamic_update_slice", "device_put"),
}
"""Operations whose results nothing that follows makes part of itself."""
_ASIDE = "_worked_out_aside"
"""Name of calls that are one operation."""


def aside(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as one operation, which reads from memory and writes there, and whose working set is not its jaxpr's (see `Size.aside`)."""

    def called(*arguments: Any) -> Any:
        return function(*arguments)

    called.__name__ = _ASIDE
    return jax.jit(called)


@dataclass(frozen=True)
class Size:
    """Bytes of a batch of some rows: `fixed + row * rows`."""

    fixed: int = 0
    row: int = 0
    aside: int = 0
    """How often the working set of what was put `aside` comes on top."""

    def __add__(self, other: "Size") -> "Size":
        return Size(self.fixed + other.fixed, self.row + other.row, self.aside + other.aside)

    def __sub__(self, other: "Size") -> "Size":
        return Size(self.fixed - other.fixed, self.row - other.row, self.aside - other.aside)

    def at(self, rows: float, aside: int = 0) -> int:
        """Bytes with this many rows, which need not be whole where rows stand for tokens, and this working set of what is aside."""
        return round(self.fixed + self.row * rows) + self.aside * aside


_APART = (Size(aside=1),)


def size_of(array: Any) -> Size:
    """Bytes of an abstract array of a batch of `ROWS` rows."""
    count = math.prod(array.shape)
    held = count * getattr(array.dtype, "itemsize", 4)
    return Size(row=held // ROWS) if count and count % ROWS == 0 else Size(fixed=held)


def working_set(jaxpr: Jaxpr, *, handed_on: int = 0, adds_in_place: bool = False) -> tuple[Size, ...]:
    """What is live beside the jaxpr's inputs, at each moment that may be the peak, whatever the rows.

    Args:
        jaxpr: a program of abstract arrays, its batch of `ROWS` rows.
        handed_on: the first outputs leave as soon as they are made (a gradient goes into its stacked array); the others stay.
        adds_in_place: a product that is added to what a loop carries is never there by itself, as on TPUs and GPUs.
    """
    return _Program(jaxpr, handed_on, adds_in_place).peaks()


def most(moments: Iterable[Size], rows: float, aside: int = 0) -> int:
    """The peak with this many rows, in bytes."""
    return max((moment.at(rows, aside) for moment in moments), default=0)


@dataclass
class _Value:
    size: Size
    sources: frozenset[int]
    """The values in memory from which this one is made whenever it is read; itself where it is in memory."""
    needed: bool = False


@dataclass
class _Op:
    from_memory: bool
    to_memory: bool
    reads: list[int]
    makes: list[int]
    inner: tuple[Size, ...] = ()


@dataclass
class _Program:
    """A jaxpr with its calls opened, as operations on numbered values."""

    jaxpr: Jaxpr
    handed_on: int
    adds_in_place: bool
    values: list[_Value] = field(default_factory=list)
    ops: list[_Op] = field(default_factory=list)
    views: dict[int, int] = field(default_factory=dict)
    """Values that are another one in a different shape."""
    products: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        names: dict[Var, int] = {}
        for var in (*self.jaxpr.constvars, *self.jaxpr.invars):
            names[var] = self._new(Size())
        self.inputs = set(names.values())
        self._open(self.jaxpr, names)
        results = [self._number(var, names) for var in self.jaxpr.outvars]
        self.results = set(results) - self.inputs
        self.staying = set(results[self.handed_on :]) - self.inputs

    def _new(self, size: Size) -> int:
        self.values.append(_Value(size, frozenset()))
        return len(self.values) - 1

    def _number(self, var: Var | Literal, names: dict[Var, int]) -> int:
        if isinstance(var, Literal):
            return self._new(Size())
        number = names[var]
        while number in self.views:
            number = self.views[number]
        return number

    def _open(self, jaxpr: Jaxpr, names: dict[Var, int]) -> None:
        for eqn in jaxpr.eqns:
            reads = [self._number(var, names) for var in eqn.invars]
            called = _called(eqn)
            if called is not None:
                inner = dict(zip(called.invars, reads, strict=True)) | {var: self._new(Size()) for var in called.constvars}
                self._open(called, inner)
                names.update(zip(eqn.outvars, [self._number(var, inner) for var in called.outvars], strict=True))
                continue
            makes = [self._new(size_of(var.aval)) for var in eqn.outvars]
            names.update(zip(eqn.outvars, makes, strict=True))
            if eqn.primitive.name in _VIEWS:
                self.views.update(zip(makes, reads, strict=True))
                continue
            if eqn.primitive.name == "dot_general":
                self.products.update(makes)
            if self.adds_in_place and eqn.primitive.name == "add" and self.inputs & set(reads) and self.products & set(reads):
                for number in (*makes, *self.products.intersection(reads)):
                    self.values[number].size = Size()
            apart = eqn.params.get("name") == _ASIDE
            inner = _APART if apart else _inner(eqn, self.adds_in_place)
            from_memory, to_memory = apart or eqn.primitive.name in _FROM_MEMORY, apart or eqn.primitive.name in _TO_MEMORY
            self.ops.append(_Op(from_memory, to_memory, reads, makes, inner))

    def peaks(self) -> tuple[Size, ...]:
        """See `working_set`."""
        self._drop_unread()
        stored = self._stored()
        self._trace_sources(stored)
        last = self._last_reads(stored)
        live, moments = Size(), [Size()]
        for index, op in enumerate(self.ops):
            made = [number for number in op.makes if number in stored]
            if not made:
                continue
            ends = [number for number in self._read_by(op).union(made) if last.get(number) == index and number not in self.inputs]
            freed = sum((self.values[number].size for number in ends), Size())
            grown = sum((self.values[number].size for number in made), Size())
            reused = self._reused(made, set(ends).difference(made)) if not op.to_memory or op.inner not in ((), _APART) else Size()
            moments += [live + grown - reused + inner for inner in op.inner or (Size(),)]
            live = live + grown - freed
        return _undominated(moments)

    def _drop_unread(self) -> None:
        needed, kept = set(self.results), list[_Op]()
        for op in reversed(self.ops):
            if needed.intersection(op.makes):
                needed.update(op.reads)
                kept.append(op)
        self.ops = kept[::-1]

    def _stored(self) -> set[int]:
        """Values in memory: what goes there, what is read from there, and the results."""
        made = (op.makes for op in self.ops if op.to_memory)
        read = (op.reads for op in self.ops if op.from_memory)
        return self.results.union(*made, *read) - self.inputs

    def _trace_sources(self, stored: set[int]) -> None:
        for number in self.inputs:
            self.values[number].sources = frozenset([number])
        for op in self.ops:
            sources = frozenset(self._read_by(op))
            for number in op.makes:
                self.values[number].sources = frozenset([number]) if number in stored else sources

    def _read_by(self, op: _Op) -> set[int]:
        return set().union(*(self.values[number].sources for number in op.reads))

    def _last_reads(self, stored: set[int]) -> dict[int, int]:
        last = {number: len(self.ops) for number in self.staying}
        for index, op in enumerate(self.ops):
            last |= {number: index for number in op.makes if number not in last}
            if stored.intersection(op.makes):
                for number in self._read_by(op):
                    last[number] = max(last.get(number, 0), index)
        return last

    def _reused(self, made: Iterable[int], ends: Iterable[int]) -> Size:
        free, total = [self.values[number].size for number in ends], Size()
        for number in made:
            size = self.values[number].size
            if size in free:
                free.remove(size)
                total += size
        return total


def _called(eqn: JaxprEqn) -> Jaxpr | None:
    """The jaxpr of an equation that only calls one, with the equation's own inputs and outputs."""
    if eqn.primitive.name in _TO_MEMORY or eqn.params.get("name") == _ASIDE:
        return None
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = eqn.params.get(name)
        if inner is not None:
            return _without_constants(inner)
    return None


def _inner(eqn: JaxprEqn, adds_in_place: bool) -> tuple[Size, ...]:
    """What a loop's body or a branch holds at its peaks."""
    bodies = {"scan": ("jaxpr",), "while": ("body_jaxpr",), "cond": ("branches",)}.get(eqn.primitive.name, ())
    inner = [body for name in bodies for body in (eqn.params[name] if name == "branches" else (eqn.params[name],))]
    return _undominated([size for body in inner for size in working_set(_without_constants(body), adds_in_place=adds_in_place)])


def _without_constants(jaxpr: Any) -> Jaxpr:
    return jaxpr if isinstance(jaxpr, Jaxpr) else jaxpr.jaxpr


def _undominated(moments: Sequence[Size]) -> tuple[Size, ...]:
    """Those that are the largest for some number of rows and some working set of what is aside, or may be."""
    kept: list[Size] = []
    for moment in sorted(set(moments), key=lambda size: (-size.aside, -size.row, -size.fixed)):
        if not kept or moment.aside < kept[-1].aside or moment.fixed > kept[-1].fixed:
            kept.append(moment)
    return tuple(kept)
