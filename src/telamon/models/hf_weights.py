"""Which Hugging Face tensor holds which weight: one table a family, read in both directions.

A family gives `hf_names`: the dotted path of a weight (within its block for a layer's; `mtp.norm.scale` for what layers for
multi-token prediction have beside a block, which stand behind the others) to the tensor's name. The rest follows
from what weights declare of themselves: Hugging Face stores a linear map as a matrix [out, in] with heads flattened, we as
[in..., out...].
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from telamon.models.weights import Model, WeightInfo, flatten

_STACKED = re.compile(r"stacks\.(\d+)\.blocks\.(\d+)\.(.+)")
_FURTHER = re.compile(r"mtp\.(\d+)\.(block\.)?(.+)")


@dataclass(frozen=True)
class HfName:
    """A tensor's name and layout."""

    template: str
    """With `{layer}` where the layer's index stands, and `{expert}` where each expert has a tensor of its own; without it, one holds all."""
    input_first: bool = False
    """The file holds the map as [in, out] (GPT-2's Conv1D, Llama 4's experts)."""
    interleaved: bool = False
    """Maps that share the tensor take turns along the output dim (GPT-OSS); otherwise they lie side by side."""


Names = Mapping[str | tuple[str, ...], str | HfName]
"""Path of a weight to a tensor; several paths share one that holds their maps together along the output dim."""


@dataclass(frozen=True)
class Part:
    """A weight, or what is at one place of its leading dims."""

    path: str
    """Dotted path in the tree of weights."""
    index: tuple[int, ...]
    """Layer within a stacked weight, and behind it the expert where each has a tensor of its own; empty for a whole weight."""
    shape: tuple[int, ...]
    """Of the weight or slice, as the model holds it."""
    inputs: int | None
    """Values a linear map reads; None for what is not one (a scale, a bias, a table of rows)."""
    experts: int | None = None
    """Experts whose maps the part holds, one behind the other; None where it holds one map."""
    rows: int | None = None
    """For a table with spare rows, how many of its rows (columns, for a head) are real."""
    rows_dim: int = 0
    """The dim that the spare rows are on."""

    @property
    def cut(self) -> tuple[int, ...]:
        """Its shape without spare rows."""
        return self.shape if self.rows is None else (*self.shape[: self.rows_dim], self.rows, *self.shape[self.rows_dim + 1 :])

    @property
    def lead(self) -> tuple[int, ...]:
        """The file's dims that count experts."""
        return () if self.experts is None else (self.experts,)


@dataclass(frozen=True)
class HfTensor:
    """A tensor of the file and the weights it holds."""

    name: str
    parts: tuple[Part, ...]
    input_first: bool = False
    interleaved: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the file."""
        sizes = [self._file_shape(part) for part in self.parts]
        dim = self._joined_dim
        return (*sizes[0][:dim], sum(size[dim] for size in sizes), *sizes[0][dim + 1 :])

    def to_ours(self, array: np.ndarray) -> list[np.ndarray]:
        """The file's tensor as one array for each part, of the same type."""
        assert array.shape == self.shape, (self.name, array.shape, self.shape)
        return [self._load(part, piece) for part, piece in zip(self.parts, self._pieces(array), strict=True)]

    def to_hf(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """The inverse of `to_ours`."""
        pieces = [self._save(part, array) for part, array in zip(self.parts, arrays, strict=True)]
        if len(pieces) == 1:
            return pieces[0]
        if not self.interleaved:
            return np.concatenate(pieces, axis=self._joined_dim)
        return np.stack(pieces, axis=self._joined_dim + 1).reshape(self.shape)

    def _pieces(self, array: np.ndarray) -> list[np.ndarray]:
        """What the file has of each part."""
        count, dim = len(self.parts), self._joined_dim
        if count == 1:
            return [array]
        if self.interleaved:
            return [array[(*(slice(None),) * dim, slice(turn, None, count))] for turn in range(count)]
        edges = np.cumsum([self._file_shape(part)[dim] for part in self.parts])[:-1]
        return np.split(array, edges, axis=dim)

    @property
    def _joined_dim(self) -> int:
        first = self.parts[0]
        return len(first.lead) + (1 if self.input_first and first.inputs is not None else 0)

    def _file_shape(self, part: Part) -> tuple[int, ...]:
        values = math.prod(part.cut[len(part.lead) :])
        if part.inputs is None:
            return part.cut if part.rows is not None else (*part.lead, values)
        outputs = values // part.inputs
        return (*part.lead, part.inputs, outputs) if self.input_first else (*part.lead, outputs, part.inputs)

    def _load(self, part: Part, piece: np.ndarray) -> np.ndarray:
        if part.inputs is not None and not self.input_first:
            piece = np.swapaxes(piece, -1, -2)
        array = piece.reshape(part.cut)
        spare = part.shape[part.rows_dim] - array.shape[part.rows_dim]
        if not spare:
            return array
        return np.pad(array, [(0, spare if dim == part.rows_dim else 0) for dim in range(array.ndim)])

    def _save(self, part: Part, array: np.ndarray) -> np.ndarray:
        array = array[tuple(slice(size) for size in part.cut)]
        if part.inputs is None:
            return array.reshape(self._file_shape(part))
        matrix = array.reshape(*part.lead, part.inputs, -1)
        return matrix if self.input_first else np.swapaxes(matrix, -1, -2)


def hf_tensors(names: Names, model: Model) -> list[HfTensor]:
    """The tensors of a model's checkpoint, layer by layer.

    Args:
        names: the family's `hf_names`.
        model: whose weights they hold.
    """
    table = {paths if isinstance(paths, tuple) else (paths,): name for paths, name in names.items()}
    paths_of = {path: paths for paths in table for path in paths}
    found: dict[str, tuple[HfName, dict[str, Part]]] = {}
    for path, info in flatten(model.info).items():
        for local, layer, part in _parts(model, path, info):
            assert local in paths_of, f"the family's hf_names lack {local}"
            name = table[paths_of[local]]
            name = HfName(name) if isinstance(name, str) else name
            for expert, each in enumerate(_by_expert(part)) if "{expert}" in name.template else ((None, part),):
                found.setdefault(name.template.format(layer=layer, expert=expert), (name, {}))[1][local] = each
    tensors = [
        HfTensor(full, tuple(parts[local] for local in paths_of[next(iter(parts))]), name.input_first, name.interleaved)
        for full, (name, parts) in found.items()
    ]
    return sorted(tensors, key=lambda tensor: _natural(tensor.name))


def tied_head(names: Names, model: Model) -> dict[str, str]:
    """For a model whose head is its embedding table: the name that a head of its own would have -> the table's."""
    return {_template(names["head"]): _template(names["embedding"])} if model.spec.tie_embeddings and "head" in names else {}


def further_tables(names: Names, model: Model) -> dict[str, str]:
    """For a family whose files repeat the tables in each layer for multi-token prediction: `mtp.embedding` and `mtp.head` -> the model's."""
    spec, tied = model.spec, tied_head(names, model)
    tables = [(f"mtp.{path}", _template(names[path])) for path in ("embedding", "head")]
    return {
        _template(names[path]).format(layer=len(spec.blocks) + depth): tied.get(original, original)
        for depth in range(len(spec.mtp))
        for path, original in tables
        if path in names
    }


def _template(name: str | HfName) -> str:
    return name if isinstance(name, str) else name.template


def _by_expert(part: Part) -> Iterator[Part]:
    assert part.experts is not None, f"{part.path} has no experts"
    for expert in range(part.experts):
        yield replace(part, index=(*part.index, expert), shape=part.shape[1:], experts=None)


def _parts(model: Model, path: str, info: WeightInfo) -> list[tuple[str, int | None, Part]]:
    """A weight as (path within its block, layer, part), for each of its layers."""
    match, further = _STACKED.fullmatch(path), _FURTHER.fullmatch(path)
    inputs = None if info.matrix is None else math.prod(info.shape[dim] for dim in info.matrix[0])
    if further is not None:
        layer, local = len(model.spec.blocks) + int(further[1]), further[3] if further[2] else f"mtp.{further[3]}"
        return [(local, layer, Part(path, (), info.shape, inputs, info.shape[0] if info.axes[0] == "experts" else None))]
    if match is None:
        rows, dim = None, 0
        if info.role == "embedding":
            dim = info.axes.index("vocab") if "vocab" in info.axes else 0
            rows = model.spec.vocab_size if "vocab" in info.axes else info.shape[dim]
        is_map = info.matrix is not None and dim == 1  # a head [D, V] is a map; a table [V, D] is looked up
        return [(path, None, Part(path, (), info.shape, info.shape[0] if is_map else None, rows=rows, rows_dim=dim))]
    stack, position, local = int(match[1]), int(match[2]), match[3]
    stacks = model.spec.stacks
    first = sum(len(each.pattern) * each.repeats for each in stacks[:stack])
    experts = info.shape[1] if info.axes[1:2] == ("experts",) else None
    return [
        (local, first + repeat * len(stacks[stack].pattern) + position, Part(path, (repeat,), info.shape[1:], inputs, experts))
        for repeat in range(stacks[stack].repeats)
    ]


def _natural(name: str) -> list[Any]:
    """Sorts layer 10 behind layer 9."""
    return [(1, int(word), "") if word.isdigit() else (0, 0, word) for word in re.split(r"(\d+)", name)]
