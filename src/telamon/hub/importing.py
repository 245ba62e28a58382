"""A model of another format becomes a run: its weights a checkpoint, tensor by tensor and in the type they came in."""

import json
import shutil
from collections import defaultdict
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from telamon.checkpoint.layouts import is_stacked
from telamon.checkpoint.streamed import StreamedWriter
from telamon.config.load import to_yaml
from telamon.config.registry import import_plugins
from telamon.config.schema import RunConfig, RunSection, TrainConfig
from telamon.data.chat_template import find_template
from telamon.data.tokenizer import load_tokenizer
from telamon.errors import ConfigError
from telamon.hub.matching import Match, match_tensors
from telamon.hub.opening import FORMS, open_source
from telamon.hub.record import HfRecord, token_ids
from telamon.hub.safetensors_folder import GENERATION_CONFIG, read_json
from telamon.hub.source import TensorSource, numpy_dtype
from telamon.hub.transfer import Transfer, say_expected_peak
from telamon.hub.whole_folder import check_free, check_space, whole_folder
from telamon.infer.run import CHECKPOINTS, CONFIG, TOKENIZER
from telamon.infer.text_record import TextRecord
from telamon.models.hf import config_from_hf
from telamon.models.hf_family import HfFamily
from telamon.models.hf_weights import HfTensor
from telamon.models.weights import Model, flatten
from telamon.watch.log import facts, human_bytes, line

if TYPE_CHECKING:
    from rich.console import Console

STEP = 0
"""The step of an imported checkpoint."""
_SPARE = 1 << 22
"""Bytes left free beside the weights: the checkpoint's own books, and the small files."""


@dataclass(frozen=True)
class _Plan:
    """What is to be read and written."""

    config: HfFamily
    match: Match
    stored: dict[str, np.dtype]
    """Dotted path of a weight -> type on disk: the source's, or where layers differ, the narrowest that holds all of them exactly."""
    parameters: int
    lacking: tuple[str, ...]
    """What config.json speaks of, as fields of a model, and the source has no tensors of."""


def import_from(
    src: str,
    run: Path | None = None,
    *,
    console: "Console",
    revision: str | None = None,
    overwrite: bool = False,
    imports: tuple[str, ...] = (),
) -> Path:
    """Open what `src` names (see `open_source`) and import it.

    Args:
        src: a folder, a `.gguf` file, or a repository.
        run: the run directory to be; none: the last word of the source's name, below runs/.
        console: told what will be needed, how far it is, and what it took.
        revision: of a repository.
        overwrite: replace a run that is there.
        imports: modules with families of the user's own.

    Returns:
        The run directory.

    Raises:
        ConfigError, DataError, CheckpointError: as `open_source` and `import_model` do.
    """
    if not src:
        raise ConfigError(f"SRC is empty; {FORMS}")
    path = Path(src).expanduser()
    run = run or Path("runs", path.stem if path.suffix == ".gguf" else path.absolute().name)
    check_free(run, overwrite=overwrite, mark=CONFIG)  # before anything is downloaded
    import_plugins(imports)
    with open_source(src, revision=revision) as source:
        import_model(source, run, console=console, overwrite=overwrite, imports=imports)
    return run


def next_command(run: Path) -> str:
    """What an imported run is good for first: a chat where it has a template, a text where it has a tokenizer."""
    text = TextRecord.read(str(run))
    if text is None:
        return f"telamon export {run} FOLDER, or train.init_from={run} in a run of your own"
    return f"telamon generate --run {run} PROMPT" if text.chat_template is None else f"telamon chat {run}"


def import_model(source: TensorSource, run: Path, *, console: "Console", overwrite: bool = False, imports: tuple[str, ...] = ()) -> None:
    """Make `run` a run directory with the model of `source` as its checkpoint of step 0.

    It is whole or not there: until all is written, the files are in a folder beside it.

    Raises:
        ConfigError: the source's config.json cannot be read, or something is in the way.
        DataError: the source's tensors are damaged or not those of its config.
        CheckpointError: the disk is too small or full.
    """
    run = check_free(run, overwrite=overwrite, mark=CONFIG)
    plan = _plan(source)
    sizes = {name: source.tensors[name].nbytes for name in plan.match.tensors}
    check_space(run, sum(sizes.values()) + _SPARE)
    record = _record(source, plan)  # before the weights, which take long
    _say(console, source, plan)
    say_expected_peak(console, sizes.values())
    with whole_folder(run) as folder:
        with Transfer(console, "import", sum(sizes.values())) as transfer:
            _copy_weights(source, plan, folder / CHECKPOINTS, transfer)
        _copy_assets(source, folder)
        _record_text(folder, run, console)
        record.write(folder)
        (folder / CONFIG).write_text(to_yaml(_run_config(source, plan, imports)), encoding="utf-8")  # last: it makes a folder a run


def _plan(source: TensorSource) -> _Plan:
    stated = config_from_hf(source.config, source=f"{source.origin}: config.json")
    config = stated.as_stored({name for name in map(stated.canonical, source.tensors) if name is not None})
    model = Model(config.spec())
    match = match_tensors(source, config, model)
    types: dict[str, set[np.dtype]] = defaultdict(set)
    for name, tensor in match.tensors.items():
        for part in tensor.parts:
            types[part.path].add(numpy_dtype(source.tensors[name].dtype))
    stored = {path: reduce(jnp.promote_types, found) for path, found in types.items()}
    lacking = tuple(f"{name}={value}" for name, value in stated if value != getattr(config, name))
    return _Plan(config, match, stored, model.parameter_count, lacking)


def _say(console: "Console", source: TensorSource, plan: _Plan) -> None:
    types = sorted({source.tensors[name].dtype for name in plan.match.tensors})
    skipped = plan.match.skipped
    facts(
        console,
        {
            "model": source.origin,
            "family": plan.config.family,
            "parameters": f"{plan.parameters:,}",
            "weights": f"{human_bytes(sum(source.tensors[name].nbytes for name in plan.match.tensors))}, {', '.join(types)}",
        },
    )
    if skipped:
        line(console, f"  {len(skipped)} tensors that the text model does not need are left out, such as {skipped[0]}")
    if plan.lacking:
        line(console, f"  config.json says {', '.join(plan.lacking)}, and there are no tensors of it: the model is imported without")
    if "tokenizer.json" not in source.assets:
        line(
            console,
            f"  there is no tokenizer.json: the model can be exported and trained on, and writes once its run has one in {TOKENIZER}/",
        )


def _copy_weights(source: TensorSource, plan: _Plan, checkpoints: Path, transfer: Transfer) -> None:
    shapes = {path: info.shape for path, info in flatten(Model(plan.config.spec()).info).items()}
    abstract = {path: jax.ShapeDtypeStruct(shape, plan.stored[path]) for path, shape in shapes.items()}
    expertwise = {part.path for tensor in plan.match.tensors.values() for part in tensor.parts if len(part.index) > is_stacked(part.path)}
    meta = {"origin": source.origin}
    with StreamedWriter(checkpoints, step=STEP, abstract=abstract, meta=meta, expertwise=expertwise) as writer:
        for name, tensor in plan.match.tensors.items():
            _copy_tensor(source.read(name), tensor, plan, writer)
            transfer.advance(source.tensors[name].nbytes)


def _copy_tensor(array: np.ndarray, tensor: HfTensor, plan: _Plan, writer: StreamedWriter) -> None:
    """A function of its own, so that a tensor is gone before the next is read."""
    for part, ours in zip(tensor.parts, tensor.to_ours(array), strict=True):
        writer.write(part.path, part.index, ours.astype(plan.stored[part.path], copy=False))


def _copy_assets(source: TensorSource, folder: Path) -> None:
    for name, path in source.assets.items():
        # What it says of generation belongs to a tokenizer, and stays with it in what is trained from the model.
        if name != GENERATION_CONFIG or "tokenizer.json" in source.assets:
            target = folder / TOKENIZER / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    ids = token_ids(source.config)
    if ids and "tokenizer.json" in source.assets and GENERATION_CONFIG not in source.assets:
        # Files from before generation_config.json say in config.json which tokens end a text; transformers reads them there too.
        (folder / TOKENIZER / GENERATION_CONFIG).write_text(json.dumps(ids) + "\n", encoding="utf-8")


def _record_text(folder: Path, run: Path, console: "Console") -> None:
    """Write down which tokenizer and chat template the weights know, where there are any that can be used."""
    if (folder / TOKENIZER / "tokenizer.json").is_file():
        try:
            TextRecord.of(load_tokenizer(str(folder / TOKENIZER)), find_template(folder / TOKENIZER)).write(str(folder))
        except ConfigError as error:
            line(console, f"  the tokenizer cannot be used as it is: {error}".replace(str(folder), str(run)))  # where it will be


def _record(source: TensorSource, plan: _Plan) -> HfRecord:
    generation = source.assets.get(GENERATION_CONFIG)
    types = {tensor.name: source.tensors[name].dtype for name, tensor in plan.match.tensors.items()}
    stored = {tensor.name: plan.stored[tensor.parts[0].path] for tensor in plan.match.tensors.values()}
    return HfRecord(
        origin=source.origin,
        config=source.config,
        generation_config=read_json(generation) if generation else None,
        dtypes={name: kind for name, kind in types.items() if numpy_dtype(kind) != stored[name]},
        copies=dict(plan.match.copies),
    )


def _run_config(source: TensorSource, plan: _Plan, imports: tuple[str, ...]) -> RunConfig:
    """The model's sizes in a run that is else the default one; activations are as precise as the weights came."""
    infos = flatten(Model(plan.config.spec()).info)
    # What routers choose by beside their weights is float32 in every file, and computed so wherever the model runs.
    trained = (name for name, tensor in plan.match.tensors.items() if infos[tensor.parts[0].path].role != "buffer")
    narrow = all(source.tensors[name].dtype == "bfloat16" for name in trained)
    train = TrainConfig(compute_dtype="bfloat16" if narrow else "float32", seq_len=plan.config.max_positions or TrainConfig().seq_len)
    return RunConfig(run=RunSection(imports=imports), model=plan.config, train=train)
