"""Which tensor of a source becomes which weight, and what to say when they do not fit."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np

from telamon.errors import DataError
from telamon.hub.source import TensorInfo, TensorSource
from telamon.models.hf_family import HfFamily
from telamon.models.hf_weights import HfTensor
from telamon.models.weights import Model

FLOATS = ("float32", "float16", "bfloat16")
"""Types that weights may have."""

_SHOWN = 5
_ROWS = 1024


@dataclass(frozen=True)
class Match:
    """What an import reads."""

    tensors: Mapping[str, HfTensor]
    """Name in the source -> what it holds, in the order of the model's layers."""
    copies: Mapping[str, str]
    """Tensor that only repeats another one -> that one, both as Hugging Face names them: a tied head that is stored all the same,
    and the tables of layers for multi-token prediction."""
    skipped: tuple[str, ...]
    """Tensors that the model does not need, as its family says."""


def match_tensors(source: TensorSource, config: HfFamily, model: Model) -> Match:
    """Pair the tensors of `source` with the weights of `model`.

    Raises:
        DataError: tensors are missing, left over, of another shape, or of a type that weights cannot have; it names them.
    """
    wanted = {tensor.name: tensor for tensor in config.tensors(model)}
    tied = config.tied(model)
    repeated = config.copies(model) | tied
    found: dict[str, str] = {}  # canonical name -> name in the source
    faults, skipped = [], []
    for name in source.tensors:
        canonical = config.canonical(name)
        if canonical is None:
            skipped.append(name)
        elif canonical in found:
            faults.append(f"{name} and {found[canonical]} are the same tensor")
        elif canonical not in wanted and canonical not in repeated:
            faults.append(f"{name} {source.tensors[name].shape} is in the source, and the model has no place for it")
        else:
            found[canonical] = name
    for name, tensor in wanted.items():
        faults += _faults(name, tensor, found, source.tensors)
    if faults:
        raise _misfit(source, faults)
    copies = {name: original for name, original in repeated.items() if name in found}
    for name, original in copies.items():
        if differs := _difference(source, found[name], found[original]):
            reason = (_TIED if name in tied else _SHARED).format(original=original, copy=name, differs=differs)
            raise DataError(f"{source.origin}: {reason}")
    return Match({found[name]: tensor for name, tensor in wanted.items()}, copies, tuple(skipped))


def _faults(name: str, tensor: HfTensor, found: Mapping[str, str], there: Mapping[str, TensorInfo]) -> Iterator[str]:
    if name not in found:
        near = get_close_matches(name, [other for other in there if other not in found.values()], 1)
        yield f"{name} {tensor.shape} is missing" + (f"; the source has {near[0]} {there[near[0]].shape}" if near else "")
        return
    info = there[found[name]]
    if info.shape != tensor.shape:
        yield f"{found[name]} has shape {info.shape}; by its config it has {tensor.shape}"
    if info.dtype not in FLOATS:
        yield f"{found[name]} is of type {info.dtype}; weights are {', '.join(FLOATS)}"


def _misfit(source: TensorSource, faults: list[str]) -> DataError:
    lines = [*faults[:_SHOWN], *([f"and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else [])]
    listed = "".join(f"\n  {line}" for line in lines)
    return DataError(
        f"{source.origin}: its tensors are not those of a {source.config.get('model_type')} of its config.json:{listed}\n"
        "Config and weights must be of one model and revision"
    )


_TIED = (
    "config.json ties the head to {original}, and {copy} differs from it ({differs}); if the head is one of its own, write "
    '"tie_word_embeddings": false into config.json'
)
_SHARED = (
    "a layer for multi-token prediction shares {original}, and {copy} differs from it ({differs}); tables of its own cannot be kept: to have "
    'the model without the layer, remove its tensors and write "num_nextn_predict_layers": 0 into config.json'
)


def _difference(source: TensorSource, copy: str, original: str) -> str | None:
    """What a stored table is, if not the one it is said to be, for then it would be lost without a word; none: they are equal."""
    ours, other = source.tensors[original], source.tensors[copy]
    same = ours == other
    if same:
        left, right = (source.read(name).view(f"u{ours.itemsize}") for name in (original, copy))
        same = all(np.array_equal(left[row : row + _ROWS], right[row : row + _ROWS]) for row in range(0, len(left), _ROWS))
    return None if same else f"{other.shape}, {other.dtype}"
