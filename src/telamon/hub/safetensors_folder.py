"""A folder as Hugging Face lays models out: config.json, safetensors in one file or in shards with an index, tokenizer files."""

import json
from collections import defaultdict
from io import BufferedReader
from pathlib import Path, PurePath
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from telamon.errors import DataError
from telamon.hub.safetensors_format import Entry, read_header
from telamon.hub.source import TensorInfo, numpy_dtype

if TYPE_CHECKING:
    import numpy as np

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
"""What a tokenizer may consist of."""
MORE_TEMPLATES = "additional_chat_templates/*.jinja"
"""Chat templates for other uses, such as tools."""

_SHOWN = 3


class SafetensorsFolder:
    """A `TensorSource` of a folder. Opening reads the headers of all its files; a tensor is read when it is asked for.

    Args:
        folder: the folder.
        origin: where it came from; none: the folder itself.

    Raises:
        DataError: a file is missing, cut short or malformed, or index and shards do not agree.
    """

    def __init__(self, folder: Path, *, origin: str | None = None):
        self.origin = origin or str(folder)
        self._folder = folder
        self._files: dict[Path, BufferedReader] = {}
        self.config = self._read_config()
        self._places = self._find_tensors()
        self.tensors: dict[str, TensorInfo] = {name: entry.info for name, (_, entry) in self._places.items()}
        named = ((name, folder / name) for name in (*TOKENIZER_FILES, GENERATION_CONFIG))
        self.assets: dict[str, Path] = {name: path for name, path in named if path.is_file()}
        self.assets |= {str(path.relative_to(folder)): path for path in sorted(folder.glob(MORE_TEMPLATES))}

    def read(self, name: str) -> "np.ndarray":
        """See `TensorSource`."""
        import numpy as np

        path, entry = self._places[name]
        array = np.empty(entry.info.shape, numpy_dtype(entry.info.dtype))
        try:
            file = self._open(path)
            file.seek(entry.offset)
            count = file.readinto(array.reshape(-1).view(np.uint8).data)  # buffered: goes on after the 2 GiB of one system call
        except OSError as error:
            raise DataError(f"{path}: the tensor {name} cannot be read: {error.strerror or error}") from error
        if count != array.nbytes:
            raise DataError(f"{path} became shorter while it was read: of the tensor {name} it has {count:,} bytes of {array.nbytes:,}")
        return array

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _open(self, path: Path) -> BufferedReader:
        if path not in self._files:
            self._files[path] = path.open("rb")
        return self._files[path]

    def _read_config(self) -> dict[str, Any]:
        path = self._folder / CONFIG
        if path.is_file():
            return read_json(path)
        if (self._folder / "config.yaml").is_file():
            raise DataError(f"{self._folder} is a run of this program; `telamon export` writes it as a Hugging Face folder")
        if (self._folder / "adapter_config.json").is_file():
            raise DataError(f"{self._folder} holds an adapter, not a model; merge it into its base model and import the result")
        if snapshots := sorted(self._folder.glob(f"snapshots/*/{CONFIG}")):
            raise DataError(
                f"{self._folder} is a repository in the cache of huggingface_hub; name one of its states, {snapshots[-1].parent}"
            )
        empty = "is empty" if self._folder.is_dir() and not any(self._folder.iterdir()) else f"has no {CONFIG}"
        raise DataError(f"{self._folder} {empty}; a model folder holds {CONFIG}, and {WEIGHTS} or shards with {INDEX}")

    def _find_tensors(self) -> dict[str, tuple[Path, Entry]]:
        weights = self._folder / WEIGHTS
        if weights.is_file():
            return {name: (weights, entry) for name, entry in read_header(weights).items()}
        if (self._folder / INDEX).is_file():
            return self._find_in_shards()
        raise DataError(f"{self._folder} has neither {WEIGHTS} nor {INDEX}{self._what_instead()}")

    def _what_instead(self) -> str:
        gone = sorted(name for name in (WEIGHTS, INDEX) if (self._folder / name).is_symlink())
        if gone:
            return f": {gone[0]} is a link to {(self._folder / gone[0]).readlink()}, which is not there; fetch the file again"
        pickles = sorted(path.name for path in self._folder.glob("*.bin"))
        if pickles:
            return (
                f", only {pickles[0]}: a pickle, which may run any code when it is opened and is not read. Convert it where you trust it: "
                f"AutoModelForCausalLM.from_pretrained({str(self._folder)!r}).save_pretrained(FOLDER) in transformers"
            )
        others = sorted(path.name for path in self._folder.glob("*.safetensors"))
        found = f", only {', '.join(others[:_SHOWN])}" if others else ""
        return f"{found}; fetch the weights of the model too"

    def _find_in_shards(self) -> dict[str, tuple[Path, Entry]]:
        listed = self._read_index()
        shards: dict[str, list[str]] = defaultdict(list)
        for name, file in listed.items():
            shards[file].append(name)
        missing = [file for file in sorted(shards) if not (self._folder / file).is_file()]
        if missing:
            raise DataError(
                f"{self._folder}: {len(missing)} of {len(shards)} shards that {INDEX} names are missing: {_some(missing)}; finish the download"
            )
        headers = {file: read_header(self._folder / file) for file in sorted(shards)}
        self._compare(listed, headers)
        return {name: (self._folder / file, headers[file][name]) for name, file in listed.items()}

    def _read_index(self) -> dict[str, str]:
        path = self._folder / INDEX
        listed = read_json(path).get("weight_map")
        if not isinstance(listed, dict) or not listed or not all(isinstance(file, str) for file in listed.values()):
            raise DataError(f"{path} has no weight_map that gives a file for each tensor; fetch it again")
        outside = sorted({file for file in listed.values() if PurePath(file).is_absolute() or ".." in PurePath(file).parts})
        if outside:
            raise DataError(f"{path} names files outside its folder: {_some(outside)}")
        return listed

    def _compare(self, listed: dict[str, str], headers: dict[str, dict[str, Entry]]) -> None:
        """Index and shards name the same tensors, each once."""
        holders: dict[str, list[str]] = defaultdict(list)
        for file, header in headers.items():
            for name in header:
                holders[name].append(file)
        faults = [f"{name} is in {' and '.join(files)}" for name, files in holders.items() if len(files) > 1]
        faults += [f"{name} is in {files[0]}, not in the index" for name, files in holders.items() if name not in listed]
        for name, file in listed.items():
            if not holders[name]:
                faults.append(f"{name} is not in {file}, where the index has it, nor in another shard")
            elif file not in holders[name]:
                faults.append(f"{name} is in {holders[name][0]}, the index has it in {file}")
        if faults:
            raise DataError(
                f"{self._folder / INDEX} does not fit its shards: {_some(faults)}; fetch the index and the shards again, of one revision"
            )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises DataError that names the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds no JSON object")
    return content


def _some(items: list[str]) -> str:
    """The first few, and how many more."""
    return ", ".join(items[:_SHOWN]) + (f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else "")
