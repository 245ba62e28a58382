"""Opening a trained run: its model, newest whole checkpoint and tokenizer."""

import json
import os
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from telamon.checkpoint.store import CheckpointStore
from telamon.config.load import load_run
from telamon.config.schema import MeshConfig, RunConfig
from telamon.data.tokenizer import IdTokenizer, Tokenizer, load_tokenizer
from telamon.errors import CheckpointError, ConfigError
from telamon.infer.engine import Generator
from telamon.models.decoder import Numerics
from telamon.models.weights import Model
from telamon.parallel.mesh import build_mesh
from telamon.watch.files import is_url, join, read_text

CONFIG, CHECKPOINTS, TOKENIZER, HF_RECORD = "config.yaml", "checkpoints", "tokenizer", "hf.json"


@dataclass(frozen=True)
class OpenedRun:
    """A run ready to generate."""

    folder: str
    config: RunConfig
    step: int
    """Of the checkpoint."""
    generator: Generator
    tokenizer: Tokenizer


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
        if (folder / CONFIG).is_file():
            return str(folder)
    near = get_close_matches(Path(run).name, names, 3) or names[-3:]
    hint = f"runs in {root}/: {', '.join(near)}" if near else f"{root}/ holds no run"
    raise ConfigError(f"no run at {run} (a folder with a {CONFIG}); {hint}")


def open_run(folder: str, *, imports: tuple[str, ...] = ()) -> OpenedRun:
    """Load a run's model from its newest whole checkpoint, over all devices.

    Args:
        folder: from `find_run`.
        imports: modules with families of the user's own.

    Raises:
        ConfigError: the run has no config, or no tokenizer.
        CheckpointError: it has no whole checkpoint.
    """
    config = load_run(join(folder, CONFIG), imports=imports).config
    tokenizer = _tokenizer(folder, config)
    store = CheckpointStore(join(folder, CHECKPOINTS), readonly=True)
    step = store.latest_valid()
    if step is None:
        damaged = f" ({len(store.skipped)} damaged)" if store.skipped else ""
        raise CheckpointError(f"{folder} holds no whole checkpoint yet{damaged}; let it train to its first (checkpoint.every)")
    mesh = build_mesh(MeshConfig())
    model = Model(config.model.spec(), Numerics(dtype=config.train.compute_dtype))
    weights = store.restore_subtree(step, "weights", model.abstract(mesh), target=f"the model of {folder}/{CONFIG}")
    generator = Generator(model, weights, eos_ids=_ends_of_text(folder, tokenizer), vocab_size=tokenizer.vocab_size, mesh=mesh)
    return OpenedRun(folder, config, step, generator, tokenizer)


def _tokenizer(folder: str, config: RunConfig) -> Tokenizer:
    if not is_url(folder) and (Path(folder) / TOKENIZER).is_dir():
        return load_tokenizer(join(folder, TOKENIZER))
    if config.data.tokenizer.path:
        return load_tokenizer(config.data.tokenizer.path)
    if all(source.kind == "synthetic" for source in config.data.sources):
        return IdTokenizer(config.model.vocab_size)
    raise ConfigError(f"{folder} holds no {TOKENIZER}; training writes it, so this run was damaged or stopped before its first step")


def _ends_of_text(folder: str, tokenizer: Tokenizer) -> set[int]:
    """Tokens that end what the model writes: a document's end, and of an imported model those that its generation config names."""
    record = json.loads(read_text(join(folder, HF_RECORD)) or "{}")
    named = (record.get("generation_config") or {}).get("eos_token_id")
    ids = named if isinstance(named, list) else [named]
    return {i for i in (*ids, tokenizer.eos_id) if i is not None}
