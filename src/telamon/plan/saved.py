"""A run's compiled train step in a file: `telamon plan --save` writes it, `telamon train --compiled` trains with it.

The file opens with a line that says what it is and a checksum of all that follows, then a header in JSON says what the program was
made for, then the programs follow, one for each number of rows that the plan's steps have. The header is compared before anything
else is looked at. The programs themselves are machine code in a pickle, so a file is trusted like code: the checksum finds damage,
not malice.
"""

import hashlib
import importlib
import json
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from telamon.config.explain import leaves
from telamon.config.load import plain
from telamon.config.schema import RunConfig
from telamon.errors import ConfigError
from telamon.train.job import Job, Programs
from telamon.train.placement import abstract_batch
from telamon.watch.environment import cpu_model, package_versions
from telamon.watch.files import write_bytes

_MAGIC = b"telamon programs 1\n"
_DIGEST = 64
_LENGTH = 8
_SHOWN = 4

_SECTIONS = ("model", "train", "optimizer")
# What a step's program does not depend on, or what the header says elsewhere (rows, options).
_BESIDE = {
    "model.preset",
    "model.published_parameters",
    "model.published_active_parameters",
    "model.max_positions",
    "train.stop_at",
    "train.batch_size",
    "train.seed",
    "train.init_from",
    "train.log_every",
}
_BESIDE_BELOW = ("train.batch_ramp", "train.xla_flags.")
_CUDA = ("jax-cuda13-plugin", "jax-cuda13-pjrt")
_COMPILERS = {"cpu": (), "tpu": ("libtpu",), "gpu": _CUDA, "cuda": _CUDA}  # a GPU that is not there calls itself by its maker's interface
_LIBRARIES = ("telamon", "jax", "jaxlib", "flax", "optax", "tokamax")


@dataclass(frozen=True)
class Header:
    """What programs were compiled for and with; two that are equal have the same programs."""

    devices: dict[str, Any]
    """Kind, number and arrangement of the devices."""
    versions: dict[str, str]
    """Packages that shape a program."""
    sources: dict[str, str]
    """Checksums of the code that is traced: this library's, and of each of `run.imports` that of its module or whole package."""
    config: dict[str, Any]
    """Settings that shape a program, by dotted key."""
    mesh: dict[str, int]
    """Size of each axis, over all slices."""
    flags: dict[str, Any]
    """XLA's options."""

    @classmethod
    def of(cls, job: Job) -> "Header":
        """That of a job's programs, in the form in which JSON gives it back."""
        header = cls(
            devices=_devices(job),
            versions=_versions(job.mesh.devices.flat[0].platform),
            sources=_sources(job.config.run.imports),
            config=_shaping(job.config),
            mesh=dict(job.mesh.shape),
            flags=job.flags,
        )
        return cls(**json.loads(json.dumps(asdict(header))))

    def differences(self, run: "Header") -> list[str]:
        """What is not the same in a run, one line each with both values."""
        found = []
        for part, ours in asdict(self).items():
            theirs = getattr(run, part)
            for name in {**ours, **theirs}:
                left, right = ours.get(name, "nothing"), theirs.get(name, "nothing")
                if left != right:
                    found.append(f"{_WORDS.get(part, '')}{name}: {left} in the file, {right} in this run")
        return found


_WORDS = {"sources": "the source of ", "versions": "the version of ", "devices": "devices, ", "mesh": "mesh.", "flags": "the XLA option "}


def step_rows(config: RunConfig) -> tuple[int, ...]:
    """The numbers of rows that steps of a run have: one, and one more for each other size of a batch ramp."""
    return tuple(sorted({config.train.batch_size_at(0), *(stage.batch_size for stage in config.train.batch_ramp)}))


@contextmanager
def uncached() -> Iterator[None]:
    """Programs that are to be saved are compiled within: on a CPU, one that JAX has from its cache of programs cannot be written again."""
    before = jax.config.jax_enable_compilation_cache
    try:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # whether there is one is remembered from the first compilation on
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def save_programs(job: Job, programs: Mapping[int, Any], path: str | Path) -> None:
    """Write compiled train steps to a file.

    Args:
        job: what they were compiled from.
        programs: rows -> the compiled step, for all of :func:`step_rows`, compiled within :func:`uncached`.
        path: a local file; it appears whole or not at all.

    Raises:
        ConfigError: the file cannot be written.
    """
    assert set(programs) == set(step_rows(job.config)), "one program for each number of rows"
    entries, payloads = [], []
    for rows, program in sorted(programs.items()):
        payload, _, out_tree = serialize_executable.serialize(program)
        metrics = out_tree.unflatten(range(out_tree.num_leaves))[1]
        entries.append({"rows": rows, "bytes": len(payload), "metrics": sorted(metrics)})
        payloads.append(payload)
    head = json.dumps({**asdict(Header.of(job)), "programs": entries}).encode()
    body = b"".join([len(head).to_bytes(_LENGTH), head, *payloads])
    write_bytes(
        path, b"".join([_MAGIC, hashlib.sha256(body).hexdigest().encode(), body]), advice="choose another place, or free some space"
    )


def load_programs(job: Job, path: str | Path) -> Programs:
    """The compiled steps of a file, for a run that they were made for.

    Raises:
        ConfigError: there is no such file, it is cut or damaged, or it was made for something else: each difference is named with both
            values. Nothing of a program is touched before all of this is known to fit.
    """
    header, entries, payloads = _read(path)
    differences = header.differences(Header.of(job))
    missing = [str(rows) for rows in step_rows(job.config) if rows not in {entry["rows"] for entry in entries}]
    if missing:
        there = " and ".join(str(entry["rows"]) for entry in entries)
        differences.append(f"rows a step (train.batch_size): {there} in the file, {' and '.join(missing)} in this run")
    if differences:
        more = [f"and {len(differences) - _SHOWN} more"] if len(differences) > _SHOWN else []
        lines = "".join(f"\n  {line}" for line in [*differences[:_SHOWN], *more])
        raise ConfigError(
            f"{path} was compiled for something else:{lines}\ncompile it anew with telamon plan --save, or leave --compiled out"
        )
    return Programs(str(path), {entry["rows"]: _load(job, entry, payload) for entry, payload in zip(entries, payloads, strict=True)})


def _read(path: str | Path) -> tuple[Header, list[dict[str, Any]], list[bytes]]:
    """A file's header, and its programs' descriptions and bytes, the checksum compared."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the compiled program {path}: {error.strerror or error}") from error
    if not content.startswith(_MAGIC):
        raise ConfigError(f"{path} is no compiled program of this version of telamon; write one with telamon plan --save")
    digest, body = content[len(_MAGIC) :][:_DIGEST], content[len(_MAGIC) + _DIGEST :]
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise ConfigError(f"{path} is cut or damaged: its checksum is another; write it anew with telamon plan --save")
    try:
        return _taken_apart(body)
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # whole, and yet not what this version writes
        raise ConfigError(
            f"{path} is of another version of telamon: its header cannot be read ({error}); write it anew with telamon plan --save"
        ) from error


def _taken_apart(body: bytes) -> tuple[Header, list[dict[str, Any]], list[bytes]]:
    start = _LENGTH + int.from_bytes(body[:_LENGTH])
    head = json.loads(body[_LENGTH:start])
    programs, payloads = head.pop("programs"), []
    entries = [{"rows": int(entry["rows"]), "bytes": int(entry["bytes"]), "metrics": list(entry["metrics"])} for entry in programs]
    for entry in entries:
        payloads.append(body[start : start + entry["bytes"]])
        start += entry["bytes"]
    if start != len(body):
        raise ValueError(f"its programs take {start} bytes of {len(body)}")
    header = Header(**head)
    header.differences(header)  # every part is a table
    return header, entries, payloads


def _load(job: Job, entry: Mapping[str, Any], payload: bytes) -> Any:
    """A program on the job's devices. What goes in and out is known from the job, so its trees are not taken from the file."""
    batch = abstract_batch(rows=entry["rows"], seq_len=job.config.train.seq_len, mesh=job.mesh)
    goes_in = jax.tree.structure(((job.abstract_state, batch), {}))
    comes_out = jax.tree.structure((job.abstract_state, dict.fromkeys(entry["metrics"], 0)))
    return serialize_executable.deserialize_and_load(payload, goes_in, comes_out, execution_devices=list(job.mesh.devices.flat))


def _shaping(config: RunConfig) -> dict[str, Any]:
    values = plain(config)
    found = leaves({section: values[section] for section in _SECTIONS})
    return {key: value for key, value in found.items() if key not in _BESIDE and not key.startswith(_BESIDE_BELOW)}


def _devices(job: Job) -> dict[str, Any]:
    devices = list(job.mesh.devices.flat)
    first = devices[0]
    # In the order of the mesh: a program is made for these places, not only for so many devices.
    places = [[getattr(device, name, None) for name in ("slice_index", "coords", "core_on_chip")] for device in devices]
    facts = {
        "kind": first.device_kind,
        "count": len(devices),
        "processes": len({device.process_index for device in devices}),
        "topology": _topology(devices),
        "arrangement": _checksum([json.dumps(places, default=list).encode()]),
    }
    # Machine code for a CPU is made for its very instructions.
    return facts | ({"processor": f"{platform.machine()} {cpu_model()}"} if first.platform == "cpu" else {})


def _topology(devices: list[Any]) -> str:
    """Chips each way, such as `4x4`, where devices have places; `2*4x4` on two slices."""
    places = [getattr(device, "coords", None) for device in devices]
    if any(place is None for place in places):
        return "none"
    extents = [max(column) - min(column) + 1 for column in zip(*places, strict=True)]
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    return (f"{slices}*" if slices > 1 else "") + "x".join(map(str, extents))


def _versions(platform_name: str) -> dict[str, str]:
    names = (*_LIBRARIES, *_COMPILERS.get(platform_name, ()))
    return {"python": ".".join(platform.python_version_tuple()[:2])} | {
        name: version for name, version in package_versions().items() if name in names
    }


def _sources(imports: tuple[str, ...]) -> dict[str, str]:
    """Checksums: a checkout can change without its version. A module of a package may use any other of it, so all of it counts."""
    found = {}
    for name in ("telamon", *imports):
        top = name.partition(".")[0]
        module = sys.modules.get(top) or importlib.import_module(top)
        folders = [Path(folder) for folder in getattr(module, "__path__", ())]
        files = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
        single = getattr(module, "__file__", None)
        if files or single is not None:
            found[name] = _checksum(file.read_bytes() for file in files or [Path(str(single))])
    return found


def _checksum(parts: Iterator[bytes] | list[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]
