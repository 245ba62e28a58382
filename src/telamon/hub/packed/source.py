"""A source whose packed weights read as bfloat16 under their plain names, as its `quantization_config` says they are packed."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from telamon.errors import DataError
from telamon.hub.packed import fp8, int4, mxfp4
from telamon.hub.packed.tensor import PackedTensor, Packing
from telamon.hub.source import TensorInfo, TensorSource
from telamon.models.hf_config import Values

if TYPE_CHECKING:
    import numpy as np

KEY = "quantization_config"
METHODS: dict[str, Callable[[Values], Packing]] = {"mxfp4": mxfp4.read, "fp8": fp8.read, "compressed-tensors": int4.read}
"""By `quant_method`: what reads the settings of a method, and gives what finds its tensors in a source."""


def unpacked(source: TensorSource) -> TensorSource:
    """The source, or where its config.json says that weights are packed, one that shows them unpacked.

    Raises:
        ConfigError: the method, or a setting of it, is not one that is read.
        DataError: tensors do not fit the method; one is named.
    """
    packing = packing_of(source.config, where=f"{source.origin}: config.json")
    if packing is None:
        return source
    with source:  # it opens its files again when it is read from
        tensors = packing(source)
    if not tensors:
        raise DataError(
            f"{source.origin}: by its config.json weights are packed, and none of its tensors is; if that is right, remove {KEY} from the file"
        )
    return UnpackedSource(source, tensors)


def packing_of(config: Mapping[str, Any], *, where: str) -> Packing | None:
    """What a config.json says of how weights are packed; none: they are not.

    Raises:
        ConfigError: the method, or a setting of it, is not one that is read; the message begins with `where`.
    """
    settings = _settings(config, where)
    if not settings:
        return None
    values = Values(settings, where=f"{where}: {KEY}")
    method = values.get("quant_method", None)
    if not isinstance(method, str) or method not in METHODS:
        raise values.refuse("quant_method", method, f"packed weights are read of {', '.join(METHODS)}; take the model's bfloat16 files")
    packing = METHODS[method](values)
    values.finish()
    return packing


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of the unpacked weights."""
    kept = {name: value for name, value in config.items() if name != KEY}
    return {name: plain_config(value) if name == "text_config" and isinstance(value, Mapping) else value for name, value in kept.items()}


def _settings(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Where files have them: beside the model's sizes, which a larger model has in `text_config`."""
    whole = Values(config, where=where)
    return whole.dictionary(KEY) or whole.inner("text_config", whole.dictionary("text_config")).dictionary(KEY)


class UnpackedSource:
    """A `TensorSource` over another one. A tensor is read and unpacked when it is asked for.

    Args:
        source: holds the packed tensors.
        packed: by plain name; the tensors they consist of are seen no more.
    """

    def __init__(self, source: TensorSource, packed: Mapping[str, PackedTensor]):
        self._source, self._packed = source, packed
        self.origin = source.origin
        self.config = plain_config(source.config)
        self.assets: Mapping[str, Path] = source.assets
        self.tensors = self._infos()

    def _infos(self) -> dict[str, TensorInfo]:
        """In the order of the source, each packed tensor where its first part is."""
        firsts = {tensor.parts[0]: name for name, tensor in self._packed.items()}
        parts = {part for tensor in self._packed.values() for part in tensor.parts}
        infos: dict[str, TensorInfo] = {}
        for name, info in self._source.tensors.items():
            if name in firsts:
                infos[firsts[name]] = self._packed[firsts[name]].info
            elif name not in parts:
                infos[name] = info
        return infos

    def read(self, name: str) -> "np.ndarray":
        """See `TensorSource`. Raises DataError where the codes are those of no number."""
        if name not in self._packed:
            return self._source.read(name)
        tensor = self._packed[name]
        return tensor.unpack(*(self._source.read(part) for part in tensor.parts))

    def __enter__(self) -> Self:
        self._source.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._source.__exit__(kind, error, trace)
