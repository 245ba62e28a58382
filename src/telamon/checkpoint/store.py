"""A folder of checkpoints of one run.

    with CheckpointStore(run / "checkpoints", keep=3) as store:
        step = store.latest_valid()
        if step is not None:
            state, meta = store.restore(step, abstract_state)
        ...
        store.save(step, state, meta)  # the next step may start at once

How a checkpoint comes to be, so that a kill at any moment leaves either a whole one or a provably unfinished one:

1. `step_00000020.pending` appears: from here on, whatever bears that step's name is ours and may be removed.
2. Orbax writes `step_00000020/` (through a temporary name, with its own commit mark).
3. `step_00000020/manifest.json` appears in one rename, with the size and CRC-32 of every file: the commit.
4. `step_00000020.pending` goes, and then the checkpoints that the retention policy no longer keeps.

A store that opens for writing removes what is pending without a manifest. A folder that lacks its manifest and is not
pending was damaged by someone else: it is named and passed over, never removed.
"""

import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from typing import Any, Self

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from telamon.checkpoint import layouts, manifest, retention, trees
from telamon.checkpoint.manifest import ArrayInfo, Manifest
from telamon.errors import CheckpointError
from telamon.watch import phases

STATE = "state"
_STEP = re.compile(r"step_(\d{8,})")
_PENDING = re.compile(r"(step_\d{8,})\.pending")
_READ_WHOLE = 1 << 22
_REMOVALS = 20
"""Attempts to remove a save that failed, 0.1 s apart."""
_log = logging.getLogger(__name__)


class CheckpointStore:
    """Saves and restores pytrees of `jax.Array`s, each with a JSON-able `meta`, under a step number.

    In a run of several processes every process makes the same calls, and the folder is one they share.

    Args:
        directory: a local folder, or a URL that Orbax can write to.
        keep: newest checkpoints kept.
        keep_every: checkpoints at multiples of this step are kept for ever.
        asynchronous: write in the background; otherwise `save` returns when the checkpoint is committed.
        readonly: neither create the folder nor tidy it; for a reader of a run that may still be writing.

    Raises:
        CheckpointError: the folder cannot be created or read.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        keep_every: int | None = None,
        asynchronous: bool = True,
        readonly: bool = False,
    ):
        self.directory = _as_path(os.fspath(directory))
        self.skipped: list[str] = []
        """Messages of the checkpoints passed over as damaged, in the order they were found."""
        self._keep, self._keep_every, self._asynchronous, self._readonly = keep, keep_every, asynchronous, readonly
        self._primary = jax.process_index() == 0
        self._own: set[int] = set()  # written or restored by this store: a part of this run's history
        self._whole: set[int] = set()  # every byte checked, or just written
        self._damaged: dict[int, str] = {}  # and what is wrong with them
        self._writer: threading.Thread | None = None
        self._error: CheckpointError | None = None
        if self._primary and not readonly:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                self._remove_unfinished()
            except OSError as error:
                raise CheckpointError(f"the folder of checkpoints {self.directory} cannot be used: {error.strerror or error}") from error
            except ImportError as error:
                raise CheckpointError(f"{self.directory} needs the extra `cloud` (pip install 'telamon[cloud]'): {error}") from error

    def steps(self) -> list[int]:
        """Steps that have a checkpoint folder, whole or not, oldest first."""
        if not self.directory.exists():
            return []
        found = (_STEP.fullmatch(path.name) for path in self.directory.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def path(self, step: int) -> epath.Path:
        """The folder of the checkpoint of `step`."""
        return self.directory / f"step_{step:08d}"

    # Writing

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> None:
        """Save `state` and `meta` under `step`; returns once `state` may be donated or overwritten.

        Waits first if the save before is still being written. Saving a step that this store has written or restored
        does nothing: it is the same state. A damaged checkpoint of that step is replaced.

        Raises:
            CheckpointError: the checkpoint of this call, or in the background the one before, could not be written;
                or a whole checkpoint of that step, from another run, is in the way. What was saved before is intact.
        """
        assert not self._readonly, "a read-only store cannot save"
        self.wait()
        if step in self._own:
            return
        leaves = trees.named_leaves(state)
        arrays = {name: trees.describe(leaf) for name, leaf in leaves.items()}
        json.dumps(meta)  # a meta that is no JSON must fail here, not in the background
        stored = trees.nest({name: trees.to_stored(leaf) for name, leaf in leaves.items() if leaf.size})
        self.start(step, stored, meta, arrays)
        if not self._asynchronous:
            self.wait()

    def start(self, step: int, stored: Any, meta: dict[str, Any], arrays: dict[str, ArrayInfo], *, patience: float | None = None) -> None:
        """Begin to write; :meth:`wait` returns once it is committed. What `save` and :mod:`telamon.checkpoint.streamed` share.

        Args:
            stored: what Orbax writes: nested dicts of arrays, or an object that writes itself.
            arrays: what the manifest says of it.
            patience: seconds after which a write that is not done counts as hung; Orbax's own 20 minutes by default.

        Raises:
            CheckpointError: as `save` does.
        """
        try:
            if self._primary:
                self._make_way(step)
                phases.mark("checkpoint begin")
            with _context(patience):
                response = ocp.save_checkpointables_async(self.path(step), {STATE: stored})
        except CheckpointError:
            raise
        except Exception as error:
            self._discard(step)
            raise self.write_error(step, error) from error
        self._writer = threading.Thread(target=self._finish, args=(step, response, meta, arrays), name=f"checkpoint-{step}")
        self._writer.start()

    def wait(self) -> None:
        """Return when no save is being written any more. Raises CheckpointError if the last one failed."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Finish the save that is being written. Python cannot do so by itself as it exits: the save would be lost."""
        try:
            self.wait()
        except CheckpointError as error:
            if kind is None:
                raise
            _log.error(str(error))  # beside the exception that is under way

    def _make_way(self, step: int) -> None:
        folder = self.path(step)
        if folder.exists() and self._find_damage(step) is None:
            raise CheckpointError(
                f"{folder} is a whole checkpoint that this run neither wrote nor restored, and is not overwritten; "
                "resume from it, or give the run another name"
            )
        self._pending(step).write_text("")
        self._remove(folder)
        self._damaged.pop(step, None)

    def _finish(self, step: int, response: Any, meta: dict[str, Any], arrays: dict[str, ArrayInfo]) -> None:
        """The background part of a save: wait for Orbax, commit, tidy. Orbax has joined all processes when it is done."""
        try:
            response.result()
            if self._primary:
                folder = self.path(step)
                Manifest(step=step, meta=meta, arrays=arrays, files=manifest.scan(folder)).write(folder)
                phases.mark("checkpoint commit")
                self._pending(step).unlink()
            self._whole.add(step)
            self._own.add(step)
            if self._primary:
                self._prune()
        except Exception as error:  # whatever it is, it must reach the loop and not die with this thread
            self._error = self.write_error(step, error)
            self._error.__cause__ = error
            self._discard(step)

    def write_error(self, step: int, error: Exception) -> CheckpointError:
        """What the user is told of a write that failed."""
        return CheckpointError(
            f"the checkpoint of step {step} could not be written: {_file_and_reason(error, self.path(step))}; "
            "checkpoints saved before are intact. Free space or choose another run.root, then resume"
        )

    def _discard(self, step: int) -> None:
        """Give the space of a failed save back now; if even that fails, the next start does it."""
        if not self._primary or step in self._whole:
            return
        for attempts_left in reversed(range(_REMOVALS)):
            try:
                self._remove(self.path(step))
                self._pending(step).unlink(missing_ok=True)
                return
            except OSError as error:  # writers that have not failed yet may still put files there
                if attempts_left:
                    time.sleep(0.1)
                else:
                    _log.warning("the unfinished checkpoint %s could not be removed (%s); the next start does it", self.path(step), error)

    def _prune(self) -> None:
        committed = [step for step in self.steps() if step in self._whole or (self.path(step) / manifest.FILE_NAME).exists()]
        for step in retention.expired((s for s in committed if s not in self._damaged), keep=self._keep, keep_every=self._keep_every):
            self._pending(step).write_text("")
            self._remove(self.path(step))
            self._pending(step).unlink()
            self._whole.discard(step)

    def _remove_unfinished(self) -> None:
        for path in list(self.directory.iterdir()):
            match = _PENDING.fullmatch(path.name)
            if not match:
                continue
            folder = self.directory / match[1]
            if not (folder / manifest.FILE_NAME).exists():
                _log.info("removing %s, which was being written when its run ended", folder)
                self._remove(folder)
            path.unlink()

    def _remove(self, folder: epath.Path) -> None:
        """Remove a pending checkpoint; its manifest first, so that a kill half-way leaves no damaged one."""
        (folder / manifest.FILE_NAME).unlink(missing_ok=True)
        for path in (folder, folder.with_name(folder.name + ".orbax-checkpoint-tmp")):
            if path.exists():
                path.rmtree()

    def _pending(self, step: int) -> epath.Path:
        return self.directory / f"step_{step:08d}.pending"

    # Reading

    def latest_valid(self) -> int | None:
        """The newest step whose checkpoint is whole, every byte checked; None if there is none.

        Damaged newer ones are named in a warning each, and in `skipped`.
        """
        self.wait()
        return self._agree(self._newest_whole)

    def _newest_whole(self) -> int | None:
        for step in reversed(self.steps()):
            if self._pending(step).exists() and not (self.path(step) / manifest.FILE_NAME).exists():
                continue  # another process is writing it
            problem = self._find_damage(step)
            if problem is None:
                return step
            message = f"skipping the damaged checkpoint {self.path(step)}: {problem}"
            self.skipped.append(message)
            _log.warning(message)
        return None

    def none_whole(self, place: str) -> CheckpointError:
        """What to raise where `latest_valid` finds none; `place` names the run or the folder."""
        if self.skipped:
            return CheckpointError(f"{place} holds no whole checkpoint: {len(self.skipped)} damaged; train or import it anew")
        return CheckpointError(f"{place} holds no whole checkpoint yet; let it train to its first (checkpoint.every)")

    def meta(self, step: int) -> dict[str, Any]:
        """The `meta` that was saved with `step`. Raises CheckpointError as `restore` does."""
        return self.contents(step).meta

    def restore(self, step: int, abstract_state: Any, *, target: str = "the model of this run") -> tuple[Any, dict[str, Any]]:
        """Read the checkpoint of `step` straight into the shapes, types and shardings of `abstract_state`.

        Args:
            abstract_state: pytree of `jax.ShapeDtypeStruct`s (or arrays); their shardings may be of any mesh.
            target: what `abstract_state` was made from, for messages.

        Returns:
            The state, a tree like `abstract_state`, and the `meta` it was saved with.

        Raises:
            CheckpointError: there is no such checkpoint, it is damaged, or its tree, shapes or types are not those
                of `abstract_state`; the message names the parameter and both sides.
        """
        contents = self.contents(step)
        state = self._load(contents, abstract_state, "", target)
        self._own.add(step)
        return state, contents.meta

    def restore_subtree(
        self, step: int, name: str, abstract: Any, *, target: str = "the model of this run", spare: str | None = None
    ) -> Any:
        """Read one branch of a checkpoint, such as "params", as :meth:`restore` does the whole.

        `spare` names a branch of it whose arrays need not be wanted, such as "mtp": those that are not are left out.
        """
        return self._load(self.contents(step), abstract, f"{name}.", target, None if spare is None else f"{name}.{spare}.")

    def _load(self, contents: Manifest, abstract: Any, prefix: str, target: str, spare: str | None = None) -> Any:
        folder = self.path(contents.step)
        wanted = trees.named_leaves(abstract, prefix)
        saved = {
            name: info
            for name, info in contents.arrays.items()
            if name.startswith(prefix) and (name in wanted or spare is None or not name.startswith(spare))
        }
        cut_alike = layouts.layouts(saved) == layouts.layouts(wanted)
        compared = (saved, wanted) if cut_alike else (layouts.by_layer(saved), layouts.by_layer(wanted))
        trees.check_fits(*compared, checkpoint=str(folder), target=target)
        placed = {name: trees.to_abstract(leaf) for name, leaf in wanted.items()}
        groups = [] if cut_alike else layouts.moves(saved, wanted)
        moved = {name for group in groups for name in group}
        found = self._read(folder, saved, {name: leaf for name, leaf in placed.items() if name not in moved})
        for group in groups:
            found |= layouts.restack(group, saved, placed, lambda leaves: self._read(folder, saved, leaves))
        return jax.tree.unflatten(jax.tree.structure(abstract), [found[name] for name in wanted])

    def _read(self, folder: epath.Path, saved: dict[str, ArrayInfo], leaves: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """Arrays by name. What is asked for was compared with the manifest already."""
        stored = {name: trees.to_abstract_stored(leaf, saved[name]) for name, leaf in leaves.items()}
        try:
            with _context():
                loaded = ocp.load(folder, trees.nest({n: leaf for n, leaf in stored.items() if leaf.size}), checkpointable_name=STATE)
        except Exception as error:
            raise CheckpointError(f"the checkpoint {folder} cannot be read: {_file_and_reason(error, folder)}") from error
        arrays = {name: trees.lookup(loaded, name) if leaf.size else trees.empty(leaf) for name, leaf in stored.items()}
        return {name: trees.from_stored(array, saved[name]) for name, array in arrays.items()}

    def contents(self, step: int) -> Manifest:
        """The manifest of the checkpoint of `step`, once every byte of it was checked. Raises CheckpointError as `restore` does."""
        self.wait()
        folder = self.path(step)
        if not folder.exists():
            there = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"there is no checkpoint of step {step} in {self.directory}; steps there: {there}")
        if self._agree(lambda: int(self._find_damage(step) is None)) == 0:
            reason = self._damaged.get(step, "the first process found it so")
            raise CheckpointError(f"the checkpoint {folder} is damaged: {reason}; resume from the one before")
        return Manifest.read(folder)

    def _find_damage(self, step: int) -> str | None:
        """What is wrong with the checkpoint of `step`; files are read once per store."""
        if step in self._whole:
            return None
        if step not in self._damaged:
            problem = manifest.damage(self.path(step))
            if problem is None:
                self._whole.add(step)
                return None
            self._damaged[step] = problem
        return self._damaged[step]

    def _agree(self, decide: Callable[[], int | None]) -> int | None:
        """The first process's decision, in every process."""
        if jax.process_count() == 1:
            return decide()
        own = decide() if self._primary else None
        decided = int(multihost_utils.broadcast_one_to_all(np.int32(-1 if own is None else own)))
        return None if decided < 0 else decided


def _as_path(directory: str) -> epath.Path:
    if "://" not in directory:
        return epath.Path(os.path.abspath(os.path.expanduser(directory)))
    try:
        return epath.Path(directory)
    except KeyError as error:
        raise CheckpointError(f"checkpoints cannot be written to {directory}: Orbax takes local folders, gs:// and s3://") from error


def _context(patience: float | None = None) -> ocp.Context:
    """How Orbax reads and writes."""
    context = ocp.Context()
    if patience is not None:
        context.async_options.timeout_secs = int(patience)
    # Weights hardly compress (7 %), and trying takes nine tenths of the time of a save.
    context.array.saving.use_compression = False
    context.array.saving.scoped_storage_options_creator = _storage
    # A background thread that fails to make a folder leaves the writers waiting for it for 20 minutes.
    context.async_options.create_directories_asynchronously = False
    # What is asked for was compared with the manifest already.
    context.pytree.loading.partial_load = True
    return context


def _storage(key: Any, value: Any) -> ocp.options.ArrayOptions.Saving.StorageOptions | None:
    """A chunk for each layer, so that a layer can be read without the others; small arrays are read whole."""
    large = isinstance(value, jax.Array) and value.nbytes > _READ_WHOLE
    if large and layouts.is_stacked(jax.tree_util.keystr(key, simple=True, separator=".")):
        return ocp.options.ArrayOptions.Saving.StorageOptions(shard_axes=(0,))
    return None


def _file_and_reason(error: BaseException, folder: epath.Path) -> str:
    """The file and the system's reason in one line, from an exception of Orbax, TensorStore or the OS."""
    text = " ".join(str(error).split())
    named = re.search(re.escape(str(folder)) + r"[^\s\"',]*", text)
    code = error.errno if isinstance(error, OSError) else re.search(r"os_error_code='(\d+)'", text)
    number = int(code[1]) if isinstance(code, re.Match) else code
    reason = os.strerror(number) if number else f"{type(error).__name__}: {text[:300]}"
    return f"{named[0].rstrip(':') if named else folder}: {reason}"


def _is_news(record: logging.LogRecord) -> bool:
    return not any(known in str(record.msg) for known in _NO_NEWS)


# Of a write that fails, each of Orbax's threads logs a traceback; the error reaches the user once, through `save` or `wait`.
# The other tells that a streamed checkpoint keeps no second record of the chunks' shapes.
_NO_NEWS = ("_SignalingThread.run() raised", "ArrayMetadata persistence is disabled")
logging.getLogger("absl").addFilter(_is_news)
