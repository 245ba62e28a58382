"""A run becomes a Hugging Face folder: its newest whole checkpoint as safetensors, with what transformers and vLLM read beside it."""

import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from telamon.checkpoint.streamed import StreamedReader
from telamon.config.load import load_run
from telamon.config.schema import RunConfig
from telamon.data.chat_template import find_template
from telamon.data.tokenizer import load_tokenizer
from telamon.errors import ConfigError
from telamon.hub.record import HfRecord, token_ids
from telamon.hub.safetensors_folder import CONFIG, GENERATION_CONFIG, INDEX, WEIGHTS, read_json
from telamon.hub.safetensors_writer import SafetensorsWriter
from telamon.hub.source import TensorInfo, numpy_dtype
from telamon.hub.tokenizer_files import copy_tokenizer, write_tokenizer
from telamon.hub.transfer import Transfer, say_expected_peak
from telamon.hub.whole_folder import check_free, check_space, whole_folder
from telamon.infer.run import CHECKPOINTS, TOKENIZER
from telamon.infer.run import CONFIG as RUN_CONFIG
from telamon.infer.text_record import TextRecord
from telamon.models.hf import hf_families
from telamon.models.hf_family import HfFamily
from telamon.models.hf_weights import HfTensor
from telamon.models.weights import Model, flatten
from telamon.watch.files import is_url, join
from telamon.watch.log import facts, human_bytes

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

DTYPES = ("float32", "bfloat16")
"""Types that an export can be asked for."""
SHARD_BYTES = 5_000_000_000
"""Most bytes of tensors in a file, where nothing else is asked for."""

_SPARE = 1 << 22
_UNITS = {"kb": 1e3, "mb": 1e6, "gb": 1e9, "": 1.0}


@dataclass(frozen=True)
class _Plan:
    """What is to be written."""

    model: HfFamily
    """With as many rows in its vocabulary as the export has."""
    tensors: dict[str, HfTensor]
    """By their names in the export, tied copies included."""
    infos: dict[str, TensorInfo]
    shards: dict[str, list[str]]
    """File -> names of its tensors."""


def export_run(
    run: str,
    destination: Path,
    *,
    console: "Console",
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    allow_mismatch: bool = False,
    imports: Sequence[str] = (),
) -> None:
    """Write the newest whole checkpoint of a run as a Hugging Face folder.

    It is whole or not there: until all is written, the files are in a folder beside it.

    Args:
        run: a run directory or its URL, trained or imported.
        destination: the folder to be.
        console: told what will be needed, how far it is, and what it took.
        dtype: of the weights, one of `DTYPES`; none: as the checkpoint has them, and of an import as its source had them.
        shard_bytes: most bytes of tensors in a file; a larger tensor has a file of its own.
        overwrite: replace an earlier export.
        allow_mismatch: write a tokenizer and chat template that are not those the weights were trained with.
        imports: modules with families of the user's own.

    Raises:
        ConfigError: the family has no Hugging Face form, or something is in the way.
        CheckpointError: the run has no whole checkpoint, or the disk is too small or full.
    """
    destination = check_free(destination, overwrite=overwrite, mark=CONFIG)
    config = load_run(join(run, RUN_CONFIG), imports=imports).config
    if not allow_mismatch:
        _check_text(run, config)
    record = HfRecord.read(run)
    model = _with_real_rows(run, config, record)
    stored = flatten(Model(config.model.spec()).info)
    reader = StreamedReader(join(run, CHECKPOINTS), abstract=stored, target=f"the model of {join(run, RUN_CONFIG)}")
    plan = _plan(model, record, reader, dtype, shard_bytes)
    sizes = {name: info.nbytes for name, info in plan.infos.items()}
    check_space(destination, sum(sizes.values()) + _SPARE)
    types = sorted({info.dtype for info in plan.infos.values()})
    facts(console, {"run": f"{run}, step {reader.step}", "weights": f"{human_bytes(sum(sizes.values()))}, {', '.join(types)}"})
    say_expected_peak(console, sizes.values())
    with whole_folder(destination) as folder:
        with Transfer(console, "export", sum(sizes.values())) as transfer:
            for file, names in plan.shards.items():
                _write_shard(folder / file, names, plan, reader, transfer)
        if len(plan.shards) > 1:
            _write_json(folder / INDEX, _index(plan))
        _write_settings(folder, _tokenizer_of(run, config), config, record, plan)


def parse_size(text: str) -> int:
    """Bytes of a size such as `5GB` or `500 MB`. Raises ConfigError."""
    match = re.fullmatch(r"([\d.]+)\s*([kmg]?b)?", text.strip().lower())
    try:
        size = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    except ValueError:
        size = 0
    if size <= 0:
        raise ConfigError(f"{text!r} is not a size; write it as 5GB or 500MB")
    return size


def _with_real_rows(run: str, config: RunConfig, record: HfRecord | None) -> HfFamily:
    """The model without the rows of its vocabulary that no token stands for.

    An import keeps those it came with, and so does what was trained from it: published models have more rows than their tokenizers know,
    and what is done with a model and its fine-tunes together needs them of one size.
    """
    model = config.model
    # One that only inherits a Hugging Face form would be written as the model it was derived from, and read as such.
    if not isinstance(model, HfFamily) or type(model) not in hf_families().values():
        raise ConfigError(
            f"{run}: the family {model.family!r} has no Hugging Face form of its own; a class derived from HfFamily that names its "
            "hf_model_types gives it one"
        )
    tokenizer = _tokenizer_of(run, config)
    if record is not None or config.train.init_from is not None or tokenizer is None:
        return model
    return model.model_copy(update={"vocab_size": min(model.vocab_size, load_tokenizer(str(tokenizer)).vocab_size)})


def _check_text(run: str, config: RunConfig) -> None:
    """Raise ConfigError where the tokenizer or template to be written is not the one that the weights were trained with."""
    record, place = TextRecord.read(run), _tokenizer_of(run, config)
    if record is not None and place is not None:
        now = TextRecord.of(load_tokenizer(str(place)), find_template(place))
        record.check(now, run=run, way_out="put the right one back, or go on all the same with --allow-mismatch")


def _tokenizer_of(run: str, config: RunConfig) -> Path | None:
    """The run's tokenizer: its own, or the one its config names; none where its data were never text."""
    if not is_url(run) and Path(run, TOKENIZER).is_dir():
        return Path(run, TOKENIZER)
    named = config.data.tokenizer.path
    return None if named is None else Path(named)


def _plan(model: HfFamily, record: HfRecord | None, reader: StreamedReader, dtype: str | None, shard_bytes: int) -> _Plan:
    tensors = {tensor.name: tensor for tensor in model.tensors(Model(model.spec()))}
    dtypes = {} if record is None else record.dtypes
    # An import has those that it came with, a model of our own those that other programs look for.
    copies = model.copies(Model(model.spec())) if record is None else record.copies
    tensors |= {copy: tensors[original] for copy, original in copies.items()}
    infos = {
        name: TensorInfo(tensor.shape, dtype or dtypes.get(tensor.name) or reader.arrays[tensor.parts[0].path].dtype)
        for name, tensor in tensors.items()
    }
    return _Plan(model, tensors, infos, _shards(infos, shard_bytes))


def _shards(infos: dict[str, TensorInfo], limit: int) -> dict[str, list[str]]:
    """Tensors in the model's order, as many to a file as fit."""
    groups: list[list[str]] = []
    room = 0
    for name, info in infos.items():
        if not groups or info.nbytes > room:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= info.nbytes
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    return {f"model-{number:05d}-of-{len(groups):05d}.safetensors": names for number, names in enumerate(groups, 1)}


def _write_shard(path: Path, names: list[str], plan: _Plan, reader: StreamedReader, transfer: Transfer) -> None:
    with SafetensorsWriter(path, {name: plan.infos[name] for name in names}) as writer:
        for name, array in _read_ahead(writer.order, plan, reader):
            writer.write(name, array)
            transfer.advance(array.nbytes)


def _read_ahead(names: Sequence[str], plan: _Plan, reader: StreamedReader) -> Iterator[tuple[str, "np.ndarray"]]:
    """The tensors in turn; while one is written, the next is read."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        pending: Future[np.ndarray] | None = None
        for name, upcoming in zip_longest(names, names[1:]):
            array = pending.result() if pending else _read(plan.tensors[name], plan.infos[name], reader)
            pending = pool.submit(_read, plan.tensors[upcoming], plan.infos[upcoming], reader) if upcoming else None
            yield name, array
            del array


def _read(tensor: HfTensor, info: TensorInfo, reader: StreamedReader) -> "np.ndarray":
    arrays = [reader.read(part.path, part.index) for part in tensor.parts]
    return tensor.to_hf(arrays).astype(numpy_dtype(info.dtype), copy=False)


def _index(plan: _Plan) -> dict[str, Any]:
    files = {name: file for file, names in plan.shards.items() for name in names}
    return {"metadata": {"total_size": sum(info.nbytes for info in plan.infos.values())}, "weight_map": files}


def generation_beside(tokenizer: Path | None) -> dict[str, Any]:
    """What the files of the model that a run was begun with say of generation."""
    if tokenizer is None:
        return {}
    file = (tokenizer if tokenizer.is_dir() else tokenizer.parent) / GENERATION_CONFIG
    return read_json(file) if file.is_file() else {}


def _write_settings(folder: Path, tokenizer: Path | None, config: RunConfig, record: HfRecord | None, plan: _Plan) -> None:
    """Everything but the weights."""
    longest = plan.model.max_positions or config.train.seq_len
    if record is not None:
        ids = token_ids(record.config)
        generation = record.generation_config
        if tokenizer is not None:
            copy_tokenizer(tokenizer, folder)
    else:
        ids = {} if tokenizer is None else write_tokenizer(tokenizer, folder, longest=longest).attributes()
        generation = {**ids, **generation_beside(tokenizer)} or None
    attributes = plan.model.model_copy(update={"max_positions": longest}).to_hf()
    # The older spelling of `dtype`, which every version of transformers and vLLM reads.
    _write_json(folder / CONFIG, {**attributes, **ids, "torch_dtype": _main_type(plan)})
    if generation is not None:
        _write_json(folder / GENERATION_CONFIG, generation)


def _main_type(plan: _Plan) -> str:
    """The type that most values have."""
    values: dict[str, int] = {}
    for info in plan.infos.values():
        values[info.dtype] = values.get(info.dtype, 0) + info.nbytes // info.itemsize
    return max(values, key=lambda name: values[name])


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
