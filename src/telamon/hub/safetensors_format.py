"""The safetensors file: 8 bytes that give the header's length, a JSON header, then the tensors' bytes end to end.

The library of that name reads a file by mapping it into memory, where every page read counts as resident until the file is closed, and
writes one only from tensors that are all in memory. An import or export holds one tensor at a time, so it reads and writes at offsets
itself (`read_header` here, `safetensors_writer`); what a header may say is still the library's to judge.

Source: the documentation of safetensors, "Format".
"""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from telamon.errors import DataError
from telamon.hub.source import TensorInfo, numpy_dtype

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
"""The types that are read, as the format and as numpy call them."""

LENGTH_BYTES = 8
_LONGEST_HEADER = 100_000_000  # the library's own limit
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class Entry:
    """A tensor of a file."""

    info: TensorInfo
    offset: int
    """First byte, from the start of the file."""


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a file, checked as the safetensors library does: they cover the file without holes or overlaps.

    Raises:
        DataError: the file is cut short, malformed, or holds a type that is not read.
    """
    raw, start = _read_json(path)
    entries = {name: _entry(path, name, fields, start) for name, fields in raw.items() if name != "__metadata__"}
    promised = max((entry.offset + entry.info.nbytes for entry in entries.values()), default=start)
    size = path.stat().st_size
    if size < promised:
        raise DataError(f"{path} is cut short: its header describes {promised:,} bytes and it has {size:,}; fetch the file again")
    _judge(path)
    return entries


def _read_json(path: Path) -> tuple[dict[str, Any], int]:
    """The header, and where the data begin."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(len(_LFS_POINTER))
            if start == _LFS_POINTER:
                raise DataError(f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in its folder")
            length = int.from_bytes(start[:LENGTH_BYTES], "little")
            if len(start) < LENGTH_BYTES or (length <= _LONGEST_HEADER and LENGTH_BYTES + length > size):
                raise DataError(f"{path} is cut short: its {size:,} bytes end within the header; fetch the file again")
            if length > _LONGEST_HEADER:
                raise DataError(f"{path} is not a safetensors file: it would begin with a header of {length:,} bytes")
            file.seek(LENGTH_BYTES)
            text = file.read(length)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not a safetensors file, or damaged: its header is no JSON ({error}); fetch the file again") from error
    if not isinstance(header, dict):
        raise DataError(f"{path} is not a safetensors file: its header is no JSON object")
    return header, LENGTH_BYTES + length


def _entry(path: Path, name: str, fields: Any, start: int) -> Entry:
    try:
        code, shape, (begin, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
        if not all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end)):
            raise ValueError
    except (TypeError, KeyError, ValueError) as error:
        text = json.dumps(fields)[:200]
        raise DataError(f"{path} is damaged: its header describes the tensor {name} as {text}; fetch the file again") from error
    if code not in DTYPES:
        raise DataError(
            f"{path}: the tensor {name} is of type {code}, which is not read (read are {', '.join(DTYPES)}); "
            "take the model's float32, float16 or bfloat16 files"
        )
    if end - begin != prod(shape) * numpy_dtype(DTYPES[code]).itemsize:
        raise DataError(f"{path} is damaged: the tensor {name} of type {code} and shape {shape} has {end - begin:,} bytes")
    return Entry(TensorInfo(shape, DTYPES[code]), start + begin)


def _judge(path: Path) -> None:
    """Refuse what the library refuses: holes, overlaps, bytes that no tensor owns."""
    import safetensors

    try:
        with safetensors.safe_open(str(path), framework="numpy"):
            pass
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise DataError(f"{path} is not a valid safetensors file: {error}; fetch the file again") from error
