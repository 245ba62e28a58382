"""Reading a `.gguf` file as a Hugging Face model: names, numbers, config and tokenizer (format: ggml-org/ggml, docs/gguf.md)."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from telamon.errors import ConfigError, DataError
from telamon.hub.gguf_config import hf_config
from telamon.hub.gguf_metadata import Metadata
from telamon.hub.gguf_names import ARCHITECTURES, ROPE_FACTORS
from telamon.hub.gguf_tokenizer import write_tokenizer
from telamon.hub.source import TensorInfo, numpy_dtype

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor

_MAGIC = b"GGUF"
_AS_STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_NUMBERS_AT_A_TIME = 1 << 20
"""A tensor is dequantised in pieces of about this many numbers, since the gguf package needs several times the room of its result."""


class GgufFile:
    """A `telamon.hub.source.TensorSource` on a GGUF file of the architectures in `ARCHITECTURES`.

    Tensors of F32, F16 and BF16 are given as they are stored. Quantised ones are dequantised to float32, each number as llama.cpp would have it.
    Rows that a converter put in another order are put back, which is exact. Gemma's norms are stored as 1 + w in float32, and w, which is given
    here, has lost the bits below those of 1 + w. The tokenizer's files are written into a folder that lasts until the source is closed.

    Raises:
        DataError: the file is missing, cut short, damaged, or not GGUF.
        ConfigError: it holds what cannot be read, named by key or tensor: an architecture, a quantisation, metadata.
    """

    def __init__(self, path: Path):
        self.origin = str(path)
        reader = _open(path)
        meta = Metadata(path, reader.fields)
        _check_readable(meta, reader)
        stored = {tensor.name: tensor for tensor in reader.tensors}
        factors = stored.pop(ROPE_FACTORS, None)
        self._architecture = ARCHITECTURES[meta.need("general.architecture", str)]
        self._stored = self._under_hf_names(stored)
        self.config: dict[str, Any] = hf_config(
            meta, {name: _shape(tensor) for name, tensor in stored.items()}, None if factors is None else factors.data
        )
        self.tensors = {name: TensorInfo(_shape(tensor), self._dtype(name)) for name, tensor in self._stored.items()}
        self._folder = TemporaryDirectory(prefix="telamon-gguf-")
        try:
            self.assets = write_tokenizer(meta, Path(self._folder.name))
        except BaseException:
            self._folder.cleanup()
            raise

    def read(self, name: str) -> "np.ndarray":
        """The tensor `name`, of `tensors[name].shape` and `.dtype`. Memory beside the result: up to 20 MB."""
        import numpy as np

        info, tensor, order = self.tensors[name], self._stored[name], self._order(name)
        result = np.empty(info.shape, numpy_dtype(info.dtype))
        step = max(1, _NUMBERS_AT_A_TIME * len(result) // max(1, result.size))
        for start in range(0, len(result), step):
            rows = slice(start, start + step)
            result[rows] = _decode(tensor, rows if order is None else order[rows]).reshape(result[rows].shape)
        return result - 1 if self._is_shifted(name) else result

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stored.clear()  # the last references to the mapped file
        self._folder.cleanup()

    def _under_hf_names(self, stored: "dict[str, ReaderTensor]") -> "dict[str, ReaderTensor]":
        named = {name: self._architecture.hf_name(name) for name in stored}
        unknown = [name for name, hf_name in named.items() if hf_name is None]
        if unknown:
            raise ConfigError(
                f"{self.origin}: {len(unknown)} tensors that its architecture does not have: {', '.join(unknown[:5])}"
                f"{', ...' if len(unknown) > 5 else ''}; import the model's original Hugging Face folder instead"
            )
        if "token_embd.weight" not in stored:
            raise DataError(
                f"{self.origin}: the tensor token_embd.weight is missing; the file holds no language model, or only a part of one"
            )
        return {hf_name: stored[name] for name, hf_name in named.items() if hf_name is not None}

    def _dtype(self, name: str) -> str:
        return "float32" if self._is_shifted(name) else _AS_STORED.get(self._stored[name].tensor_type.name, "float32")

    def _is_shifted(self, name: str) -> bool:
        return self._architecture.norms_plus_one and name.endswith("norm.weight")

    def _order(self, name: str) -> "np.ndarray | None":
        """Where row i of the result lies in the file: rows of rotary pairs go back to two halves for each head."""
        import numpy as np

        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.rpartition(".")[0].rpartition(".")[2])
        if not self._architecture.interleaved or heads is None:
            return None
        rows, count = self.tensors[name].shape[0], self.config[heads]
        if count <= 0 or rows % (2 * count):
            raise DataError(f"{self.origin}: {name} has {rows} rows, which cannot be {count} heads; {heads} in the metadata is wrong")
        return np.arange(rows).reshape(count, rows // count // 2, 2).swapaxes(1, 2).reshape(-1)


def _open(path: Path) -> "GGUFReader":
    from gguf import GGUFReader

    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    if magic != _MAGIC:
        raise DataError(f"{path} is not a GGUF file: it begins with {magic!r}, not {_MAGIC!r}")
    try:
        return GGUFReader(path)
    except (ValueError, LookupError, ArithmeticError, TypeError, MemoryError) as error:  # what reading at random places can bring about
        raise DataError(
            f"{path} ({path.stat().st_size:,} bytes) is cut short or damaged, or of a newer kind than the gguf package knows: {error}; fetch it again"
        ) from error


def _check_readable(meta: Metadata, reader: "GGUFReader") -> None:
    from gguf import GGMLQuantizationType, GGUFEndian

    if reader.endianess is not GGUFEndian.LITTLE:
        raise ConfigError(f"{meta.path} is big-endian; convert it with gguf_convert_endian.py of the gguf package")
    if meta.get("split.count", int, 0) > 1:
        raise ConfigError(f"{meta.path} is one of several parts of a model; join them with llama.cpp's `llama-gguf-split --merge`")
    architecture = meta.need("general.architecture", str)
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{meta.path}: the metadata general.architecture is {architecture!r}; architectures that can be read: {', '.join(ARCHITECTURES)}"
        )
    for tensor in reader.tensors:
        if not _is_readable(tensor.tensor_type):
            known = ", ".join(kind.name for kind in GGMLQuantizationType if _is_readable(kind))
            raise ConfigError(f"{meta.path}: the tensor {tensor.name} is stored as {tensor.tensor_type.name}; what can be read: {known}")


@cache
def _is_readable(kind: "GGMLQuantizationType") -> bool:
    """Whether the gguf package can dequantise it: one block is tried, since the package has no list."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES, dequantize

    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _shape(tensor: "ReaderTensor") -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))


def _decode(tensor: "ReaderTensor", rows: "slice | np.ndarray") -> "np.ndarray":
    """Numbers of some rows of a tensor."""
    from gguf import dequantize

    stored = _AS_STORED.get(tensor.tensor_type.name)
    if stored is not None:
        return tensor.data[rows].view(numpy_dtype(stored))
    # One long row: the package works through rows in groups of 16, each with the overhead of some twenty calls.
    return dequantize(tensor.data[rows].reshape(1, -1), tensor.tensor_type)
