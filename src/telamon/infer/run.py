"""Opening a trained run: its model, newest whole checkpoint and tokenizer."""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from jax.sharding import Mesh

from telamon.checkpoint.store import CheckpointStore
from telamon.config.load import load_run
from telamon.config.schema import MeshConfig, RunConfig
from telamon.data.chat_template import ChatTemplate, configured_template, find_template, read_template
from telamon.data.tokenizer import IdTokenizer, Tokenizer, load_tokenizer
from telamon.errors import ConfigError, DataError
from telamon.infer.engine import Generator
from telamon.infer.text_record import TextRecord
from telamon.models.decoder import Numerics
from telamon.models.mtp import FURTHER
from telamon.models.weights import Model, Weights
from telamon.parallel.mesh import build_mesh
from telamon.parallel.start import keep_programs
from telamon.watch.files import is_url, join, read_text

CONFIG, CHECKPOINTS, TOKENIZER, HF_RECORD = "config.yaml", "checkpoints", "tokenizer", "hf.json"
GENERATION = "generation_config.json"
"""Beside the tokenizer: what Hugging Face's files say of generation."""


@dataclass(frozen=True)
class OpenedRun:
    """A run ready to generate."""

    folder: str
    config: RunConfig
    step: int
    """Of the checkpoint."""
    model: Model
    weights: Weights
    mesh: Mesh
    tokenizer: Tokenizer
    template: ChatTemplate | None
    """For chats; none: the run knows none."""
    ends: frozenset[int]
    """Tokens that end a text."""

    @property
    def context(self) -> int:
        """Most tokens of a text: the rows that the weights have seen.

        Where they began as another model's, these are not only the rows of this run, which may be short; then it is what the model is made for.
        """
        rows, made_for = self.config.train.seq_len, self.config.model.max_positions
        return rows if self.config.train.init_from is None or made_for is None else max(rows, made_for)

    def generator(self, *, also_ends: Iterable[int] = ()) -> Generator:
        """The model as one that writes, and stops at `ends` and at these tokens."""
        return Generator(self.model, self.weights, eos_ids=self.ends | set(also_ends), vocab_size=self.tokenizer.vocab_size, mesh=self.mesh)


def find_run(run: str | None, *, root: str = "runs") -> str:
    """The directory of a run.

    Args:
        run: a run directory or URL, or a name below `root`; none: the newest run there.
        root: folder of runs.

    Raises:
        ConfigError: there is no such run; the message names those that exist and are near.
    """
    found = sorted(Path(root).glob(f"*/{CONFIG}"), key=os.path.getmtime)
    names = [path.parent.name for path in found]
    if run is None:
        if not names:
            raise ConfigError(f"there is no run in {root}/ yet; train one with `telamon train`, or name one with --run")
        return str(found[-1].parent)
    if is_url(run):
        return run
    for folder in (Path(run), Path(root) / run):
        if run and (folder / CONFIG).is_file():
            return str(folder)
    near = get_close_matches(Path(run).name, names, 3) or names[-3:]
    hint = f"runs in {root}/: {', '.join(near)}" if near else f"{root}/ holds no run"
    raise ConfigError(f"no run at {run or repr(run)} (a folder with a {CONFIG}); {hint}")


def open_run(folder: str, *, imports: tuple[str, ...] = (), template: Path | None = None, allow_mismatch: bool = False) -> OpenedRun:
    """Load a run's model from its newest whole checkpoint, over all devices.

    Args:
        folder: from `find_run`.
        imports: modules with families of the user's own.
        template: file of a chat template; none: the run's own, if it has one.
        allow_mismatch: take a tokenizer or template that is not the one the weights were trained with.

    Raises:
        ConfigError: the run has no config or no tokenizer, or not the tokenizer or template that its weights were trained with.
        CheckpointError: it has no whole checkpoint.
    """
    config = load_run(join(folder, CONFIG), imports=imports).config
    tokenizer, chat = _text(folder, config, template)
    record = TextRecord.read(folder)
    if record is not None and not allow_mismatch:
        record.check(
            TextRecord.of(tokenizer, chat), run=folder, way_out="put the right one back, or go on all the same with --allow-mismatch"
        )
    store = CheckpointStore(join(folder, CHECKPOINTS), readonly=True)
    step = store.latest_valid()
    if step is None:
        raise store.none_whole(folder)
    keep_programs(config.run.compile_cache)
    mesh = build_mesh(MeshConfig())
    model = Model(config.model.spec().main, Numerics(dtype=config.train.compute_dtype))
    weights = store.restore_subtree(step, "weights", model.abstract(mesh), target=f"the model of {folder}/{CONFIG}", spare=FURTHER)
    return OpenedRun(folder, config, step, model, weights, mesh, tokenizer, chat, ends_of_text(folder, tokenizer))


def _text(folder: str, config: RunConfig, template: Path | None) -> tuple[Tokenizer, ChatTemplate | None]:
    """The run's tokenizer, and its chat template unless another one's file is given."""
    own, named = Path(folder) / TOKENIZER, config.data.tokenizer.path
    kept = not is_url(folder) and own.is_dir()
    place = own if kept else None if named is None else Path(named)
    if place is None:
        if all(source.kind == "synthetic" for source in config.data.sources):
            return IdTokenizer(config.model.vocab_size), None
        if read_text(join(folder, HF_RECORD)) is not None:
            raise ConfigError(f"{folder} was imported without a tokenizer; put the model's tokenizer.json into {join(folder, TOKENIZER)}")
        raise ConfigError(f"{folder} holds no {TOKENIZER}; training writes it, so this run was damaged or stopped before its first step")
    tokenizer = load_tokenizer(str(place))
    if template is not None:
        return tokenizer, read_template(template, beside=place)
    return tokenizer, find_template(place) if kept else configured_template(config.data.tokenizer)


def ends_of_text(folder: str, tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens that end what the model writes: a document's end, and those that an imported model's generation config names.

    Raises DataError where that cannot be read.
    """
    file = join(folder, TOKENIZER, GENERATION)
    try:
        named = json.loads(read_text(file) or "{}").get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise DataError(f"{file} is no JSON object ({error}); put the model's own back, or remove it") from error
    ids = named if isinstance(named, list) else [] if named is None else [named]
    if not all(isinstance(i, int) for i in ids):
        raise DataError(f"{file}: eos_token_id={named!r} is neither a token's id nor a list of ids; correct it, or remove it")
    ids = [i for i in ids if 0 <= i < tokenizer.vocab_size]  # files say -1 where there is none
    return frozenset(i for i in (*ids, tokenizer.eos_id) if i is not None)
