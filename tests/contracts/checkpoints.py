"""Reference fixtures as models of ours, for the tests of this folder."""

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from reference import fixtures

from telamon.hub.safetensors_folder import SafetensorsFolder
from telamon.layers.parts import Context
from telamon.models.hf import config_from_hf, hf_families
from telamon.models.hf_family import HfFamily
from telamon.models.hf_weights import HfTensor
from telamon.models.weights import Model, Weights, flatten


@dataclass(frozen=True)
class Case:
    """A fixture, and the model that its files describe."""

    fixture: fixtures.Fixture
    config: HfFamily
    model: Model
    weights: Weights

    @property
    def tensors(self) -> list[HfTensor]:
        return self.config.tensors(self.model)


def names() -> list[str]:
    """The fixtures of registered families."""
    return [name for name in fixtures.names() if fixtures.load(name).config["model_type"] in hf_families()]


@functools.cache
def load(name: str, **changes: Any) -> Case:
    """A fixture's model; `changes` are fields of its config."""
    fixture = fixtures.load(name)
    sizes = config(fixture).model_copy(update=changes)
    model = Model(sizes.spec())
    return Case(fixture, sizes, model, to_tree(model, sizes.tensors(model), tensors_of(fixture, sizes)))


def config(fixture: fixtures.Fixture) -> HfFamily:
    """The sizes in a fixture's config.json."""
    sizes = config_from_hf(fixture.config, source=f"{fixture.name}/config.json")
    # Transformers 5.12.1 stretches OLMo 3's sliding layers too; the model was trained otherwise, and that is our default.
    as_transformers = fixture.config["model_type"] == "olmo3" and fixture.meta.get("rope_on_sliding_layers") != "plain"
    return sizes.model_copy(update={"scale_sliding_rope": True}) if as_transformers else sizes


def tensors_of(fixture: fixtures.Fixture, config: HfFamily) -> dict[str, np.ndarray]:
    """The checkpoint's tensors that the model needs, under their canonical names, but for those that only repeat another one."""
    repeated = config.copies(Model(config.spec()))
    with tempfile.TemporaryDirectory() as folder, SafetensorsFolder(fixture.checkpoint(Path(folder))) as source:
        names = {config.canonical(name): name for name in source.tensors}
        return {canonical: np.array(source.read(name)) for canonical, name in names.items() if canonical and canonical not in repeated}


def to_tree(model: Model, tensors: list[HfTensor], arrays: dict[str, np.ndarray]) -> Weights:
    """Weights in float32 from the file's tensors."""
    flat = {path: np.zeros(info.shape, np.float32) for path, info in flatten(model.info).items()}
    for tensor in tensors:
        for part, array in zip(tensor.parts, tensor.to_ours(arrays[tensor.name]), strict=True):
            flat[part.path][part.index] = array
    return _nested(model, flat)


def buffers(case: Case) -> set[str]:
    """Tensors that no gradient reaches, here and in transformers."""
    info = flatten(case.model.info)
    return {tensor.name for tensor in case.tensors if info[tensor.parts[0].path].role == "buffer" and "mtp." not in tensor.parts[0].path}


def _nested(model: Model, flat: dict[str, np.ndarray]) -> Weights:
    paths = iter(flatten(model.info))
    return model.map_info(lambda info: jnp.asarray(flat[next(paths)]))


@dataclass(frozen=True)
class Answers:
    """What our model says to everything a fixture asks, from one compiled program."""

    logits: np.ndarray
    """[2, T, V] of the plain rows."""
    packed: np.ndarray
    padded: np.ndarray
    long: np.ndarray
    jump: np.ndarray
    loss: float
    gradients: dict[str, np.ndarray]
    """By Hugging Face name, in the file's shape; of all that the loss depends on."""


@functools.cache
def ask(name: str) -> Answers:
    """All rows of a fixture in one batch, padded on the right to the longest; the loss is of the first two alone."""
    case = load(name)
    e = case.fixture.expected
    T = max(len(e["padded_ids"]), e["ids"].shape[1])
    rows = [_row(ids, np.arange(len(ids)), np.ones_like(ids), T) for ids in e["ids"]]
    sizes = e["packed_lengths"]
    documents = np.concatenate([np.arange(size) for size in sizes]), np.repeat(np.arange(len(sizes)) + 1, sizes)
    rows.append(_row(e["packed_ids"], documents[0], documents[1], T))
    rows.append(_row(e["padded_ids"], e["padded_positions"], e["padded_mask"], T))
    ones = np.ones_like(e["long_ids"])
    rows += [_row(e["long_ids"], np.arange(len(ones)) + offset, ones, T) for offset in e["long_offsets"]]
    rows.append(_row(e["long_ids"], e["jump_positions"], ones, T))
    tokens, positions, segments = (jnp.asarray(np.stack(x), jnp.int32) for x in zip(*rows, strict=True))

    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(weights: Weights) -> tuple[jax.Array, jax.Array]:
        decoder = case.model.bind(weights)
        logits = decoder.logits(decoder(tokens, positions=positions, segments=segments).hidden)
        length = e["ids"].shape[1]
        scores = jax.nn.log_softmax(logits[:2, : length - 1])
        return -jnp.mean(jnp.take_along_axis(scores, tokens[:2, 1:length, None], axis=-1)), logits

    (value, logits), gradients = jax.jit(loss)(case.weights)
    logits, flat = np.asarray(logits), {path: np.asarray(x) for path, x in flatten(gradients).items()}
    return Answers(
        logits=logits[:2, : e["ids"].shape[1]],
        packed=logits[2, : len(e["packed_ids"])],
        padded=logits[3][np.flatnonzero(e["padded_mask"])],
        long=logits[4:-1, : len(ones)],
        jump=logits[-1, : len(ones)],
        loss=float(value),
        gradients=by_tensor(case, flat, further=False),
    )


def by_tensor(case: Case, flat: dict[str, np.ndarray], *, further: bool) -> dict[str, np.ndarray]:
    """Values by path as the file's tensors: those of the model itself, or of what predicts further tokens."""
    tensors = [tensor for tensor in case.tensors if tensor.parts[0].path.startswith("mtp.") == further]
    return {tensor.name: tensor.to_hf([flat[part.path][part.index] for part in tensor.parts]) for tensor in tensors}


def _row(ids: np.ndarray, positions: np.ndarray, segments: np.ndarray, length: int) -> tuple[np.ndarray, ...]:
    return tuple(np.pad(x, (0, length - len(ids))) for x in (ids, positions, segments))


def stream_sizes(name: str) -> np.ndarray:
    """As the fixture's `long_streams`: the root mean square of the stream, layer by layer [4, L + 1, T]."""
    case = load(name)
    ids, offsets = case.fixture.expected["long_ids"], case.fixture.expected["long_offsets"]
    tokens = jnp.broadcast_to(jnp.asarray(ids, jnp.int32), (len(offsets), len(ids)))
    positions = jnp.asarray(offsets, jnp.int32)[:, None] + jnp.arange(len(ids))
    ones = jnp.ones_like(tokens)

    @jax.jit
    def sizes(weights: Weights) -> jax.Array:
        decoder = case.model.bind(weights)
        streams = [decoder.embed(tokens, positions)]
        for stack in decoder.stacks:
            graph, stacked = nnx.split(stack.blocks)
            for repeat in range(len(jax.tree.leaves(stacked)[0])):
                for block in nnx.merge(graph, jax.tree.map(lambda leaf, repeat=repeat: leaf[repeat], stacked)):
                    stream, _, _ = block(streams[-1], Context(tokens, positions, ones, positions, ones), None)
                    streams.append(stream)
        streams[-1] = decoder.norm(streams[-1])
        return jnp.stack([jnp.sqrt(jnp.mean(jnp.square(stream), axis=-1)) for stream in streams], axis=1)

    return np.asarray(sizes(case.weights))


def report(name: str, ours: np.ndarray, theirs: np.ndarray) -> str:
    """Where logits differ: by position, and at far positions by layer, so that the first wrong layer is seen."""
    by_position = np.abs(ours - theirs).max(axis=-1)
    expected = case_streams(name)
    by_layer = (np.abs(stream_sizes(name) - expected) / expected).max(axis=(0, 2))
    layers = [f"  {label:<9} {by_layer[i]:.1e}" for i, label in enumerate(_labels(len(by_layer)))]
    return "\n".join([f"by position: {np.array2string(by_position, precision=6)}", "stream at far positions, relative:", *layers])


def case_streams(name: str) -> np.ndarray:
    return load(name).fixture.expected["long_streams"]


def _labels(count: int) -> list[str]:
    return ["embedding", *(f"layer {i}" for i in range(count - 2)), "the end"]
