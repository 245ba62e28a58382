"""What an import reads from, whatever the format: a config and named tensors, read one at a time."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class TensorInfo:
    """Shape and type of a tensor as `TensorSource.read` gives it."""

    shape: tuple[int, ...]
    dtype: str
    """A numpy name: `float32`, `float16`, `bfloat16` (of ml_dtypes), ..."""

    @property
    def itemsize(self) -> int:
        """Bytes of a value."""
        return numpy_dtype(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * self.itemsize


class TensorSource(Protocol):
    """A model of another format. A context manager: leaving it closes its files."""

    @property
    def origin(self) -> str:
        """Where the model came from, for messages and the record of an import: a folder, `organisation/name@commit`, a file."""
        ...

    @property
    def config(self) -> dict[str, Any]:
        """Attributes as in Hugging Face's config.json, `model_type` among them."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor of the source, under its Hugging Face name."""
        ...

    @property
    def assets(self) -> Mapping[str, Path]:
        """Files carried along unread, by name: tokenizer.json, tokenizer_config.json, generation_config.json, chat_template.jinja, ..."""
        ...

    def read(self, name: str) -> "np.ndarray":
        """The tensor `name`, as `tensors[name]` describes it. Raises DataError where the file no longer holds it."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


def numpy_dtype(name: str) -> "np.dtype":
    """The numpy type of a name, those of ml_dtypes (`bfloat16`, `float8_e4m3fn`, ...) included."""
    import ml_dtypes
    import numpy as np

    return np.dtype(getattr(ml_dtypes, name, name))
