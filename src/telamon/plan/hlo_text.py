"""The text of a compiled program, taken apart: computations, their instructions, and what each says of itself."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

_BITS = {"pred": 8, "token": 0, "opaque": 0, "s4": 4, "u4": 4, "s2": 2, "u2": 2, "c64": 64, "c128": 128}
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")


class Instruction(NamedTuple):
    """One line of a computation: `name = shape opcode(operands), attributes`."""

    name: str
    shape: str
    opcode: str
    literal: str
    """What stands in the parentheses: a constant's value, a parameter's number."""
    operands: tuple[str, ...]
    attributes: str
    root: bool

    @property
    def called(self) -> tuple[str, ...]:
        """Computations that the instruction runs once: a fusion's, a call's, each branch of a conditional."""
        found = re.findall(r"\b(?:calls|to_apply|true_computation|false_computation)=%?([\w.-]+)", self.attributes)
        branches = self.find(r"\b(?:branch_computations|called_computations|calls)=\{([^}]*)\}") or ""
        return (*found, *re.findall(r"%?([\w.-]+)", branches))

    def find(self, pattern: str) -> str | None:
        """The first group of a pattern in the attributes; none where it does not occur."""
        match = re.search(pattern, self.attributes)
        return match and match[1]

    def text(self, key: str) -> str:
        """The value of `key="..."`; empty where there is none."""
        return self.find(rf'\b{key}="([^"]*)"') or ""

    def word(self, key: str) -> str:
        """The value of `key=word`; empty where there is none."""
        return self.find(rf"\b{key}=([\w>-]+)") or ""

    def name_of(self, key: str) -> str:
        """The computation named by `key=%name`."""
        return self.find(rf"\b{key}=%?([\w.-]+)") or ""

    def numbers(self, key: str) -> list[int]:
        """The list in `key={0,1}`; empty where there is none."""
        found = self.find(rf"\b{key}=\{{([\d,]*)\}}")
        return [int(number) for number in found.split(",")] if found else []


Computation = dict[str, Instruction]
"""Instructions by name, in their order."""


@dataclass(frozen=True)
class Module:
    """A program."""

    computations: dict[str, Computation]
    entry: str
    partitions: int
    """Devices that the program runs on together: all of them, or those of a slice where slices talk through their hosts."""


def parse(text: str) -> Module:
    """The computations of a program in HLO's text form, read line by line: the text may have a hundred megabytes."""
    computations: dict[str, Computation] = {}
    entry, partitions, current = "", 1, {}
    for line in _lines(text):
        if line.startswith("HloModule"):
            partitions = int((re.findall(r"\bnum_partitions=(\d+)", line) or ["1"])[0])
        elif line[0] in " \t":
            if instruction := _instruction(line):
                current[instruction.name] = instruction
        elif line.endswith("{") and (head := re.match(r"(ENTRY )?%?([\w.-]+) ", line)):
            current = computations.setdefault(head[2], {})
            entry = head[2] if head[1] else entry
    assert entry, "not the text of a program"
    return Module(computations, entry, partitions)


def array_shapes(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """(element type, sizes) of the arrays in a shape, those of a tuple in order."""
    return [(kind, tuple(int(size.strip("<=")) for size in sizes.split(",") if size)) for kind, sizes in _ARRAY.findall(shape)]


def byte_size(shape: str) -> int:
    """Bytes of the arrays in a shape, without what a layout pads."""
    return sum(-(-math.prod(sizes) * _bits(kind) // 8) for kind, sizes in array_shapes(shape))


def _bits(kind: str) -> int:
    return _BITS[kind] if kind in _BITS else int(re.findall(r"\d+", kind)[0])


def _lines(text: str) -> Iterator[str]:
    """The text's lines, with those that a line break within an attribute has cut put together again."""
    begun = ""
    for match in re.finditer(r"[^\n]+", text):
        line = match[0]
        if begun and not (line[0] in " \t%" or line == "}" or line.startswith(("ENTRY ", "HloModule"))):
            begun += line
            continue
        if begun:
            yield begun
        begun = line
    if begun:
        yield begun


def _instruction(line: str) -> Instruction | None:
    name, equals, rest = line.strip().partition(" = ")
    if not equals:
        return None
    root = name.startswith("ROOT ")
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    literal = rest[opening + 1 : closing]
    operands = tuple(re.findall(r"%([\w.-]+)", literal))
    return Instruction(name.removeprefix("ROOT ").lstrip("%"), shape, rest[:opening], literal, operands, rest[closing + 1 :], root)


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at `start` closes."""
    depth = 0
    for match in re.finditer(r"[()]", text[start:]):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return start + match.start()
    raise AssertionError(f"unbalanced parentheses in {text[:80]!r}")
