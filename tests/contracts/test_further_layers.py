"""A published model's layer for multi-token prediction: what it makes of a text, its loss and gradients, and its way in and out."""

import functools
import json
from pathlib import Path
from typing import Any

import checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import fixtures
from safetensors.numpy import load_file, save_file

from telamon.checkpoint.streamed import StreamedReader
from telamon.config.load import load_run
from telamon.config.schema import TrainConfig
from telamon.errors import DataError
from telamon.hub.exporting import export_run
from telamon.hub.importing import import_from
from telamon.hub.record import HF_RECORD
from telamon.models.hf import config_from_hf
from telamon.models.weights import Weights, flatten
from telamon.train.loss import language_model_loss
from telamon.watch.log import make_console

NAME = "deepseek-v3-mtp"
LAYER = "model.layers.2."
LOGITS, RELATIVE = 1e-4, 1e-4
QUIET = make_console(quiet=True)


@functools.cache
def _answers() -> tuple[np.ndarray, float, dict[str, np.ndarray]]:
    """Logits of the layer [B, T, V], its part of the loss, and the gradients of that part, by path."""
    case = checkpoints.load(NAME)
    ids = case.fixture.expected["ids"].astype(np.int32)
    T = ids.shape[1]
    batch: Any = {
        "tokens": ids,
        "targets": np.roll(ids, -1, axis=1),
        "mask": np.broadcast_to(np.arange(T) < T - 1, ids.shape).astype(np.float32),
        "segments": np.ones_like(ids),
        "positions": np.broadcast_to(np.arange(T, dtype=np.int32), ids.shape),
        "bytes": np.ones_like(ids),
    }
    tokens, positions, segments = (jnp.asarray(batch[name]) for name in ("tokens", "positions", "segments"))
    objective = language_model_loss(TrainConfig(loss_chunk=64))

    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(weights: Weights) -> tuple[jax.Array, jax.Array]:
        decoder = case.model.bind(weights)
        term = objective.measure(decoder, batch, jax.random.key(0)).terms["mtp"]
        hidden = decoder(tokens, positions=positions, segments=segments).hidden
        further = decoder.further(hidden, tokens, positions=positions, segments=segments)
        return term.sum / term.denominator, decoder.logits(further.hidden[0])

    (value, logits), gradients = jax.jit(loss)(case.weights)
    return np.asarray(logits), float(value), {path: np.asarray(leaf) for path, leaf in flatten(gradients).items()}


@pytest.mark.xdist_group(f"fixture {NAME}")
def test_logits_are_those_of_its_authors_layer():
    expected = checkpoints.load(NAME).fixture.expected["mtp_logits"]
    assert np.abs(_answers()[0][:, :-1] - expected).max() < LOGITS


@pytest.mark.xdist_group(f"fixture {NAME}")
def test_loss_and_gradients():
    case = checkpoints.load(NAME)
    expected = case.fixture.expected
    _, value, flat = _answers()
    assert value == pytest.approx(float(expected["mtp_loss"]), rel=RELATIVE)
    norms = dict(zip(map(str, expected["mtp_grad_names"]), expected["mtp_grad_norms"], strict=True))
    ours = checkpoints.by_tensor(case, flat, further=True)
    buffers = {name for name in ours if name.endswith("e_score_correction_bias")}
    assert set(norms) == set(ours) - buffers
    for name, gradient in ours.items():
        expected_norm = 0.0 if name in buffers else norms[name]
        assert np.linalg.norm(gradient.astype(np.float64)) == pytest.approx(expected_norm, rel=RELATIVE), name


def test_its_weights_are_a_part_of_the_run(tmp_path: Path):
    """The import has them, tables that repeat the model's only once; the export has these again."""
    source = fixtures.load(NAME).checkpoint(tmp_path / "source")
    run = import_from(str(source), tmp_path / "run", console=QUIET)
    model = load_run(run / "config.yaml").config.model
    assert model.mtp_layers == 1  # pyright: ignore[reportAttributeAccessIssue]
    reader = StreamedReader(run / "checkpoints")
    assert reader.arrays["mtp.0.block.ffn.experts.gate"].shape == (8, 32, 9)
    assert not any("head" in path or "embedding" in path for path in reader.arrays if path.startswith("mtp."))
    file = load_file(source / "model.safetensors")
    np.testing.assert_array_equal(reader.read("mtp.0.projection", ()), file[f"{LAYER}eh_proj.weight"].T)
    np.testing.assert_array_equal(reader.read("mtp.0.block.ffn.experts.gate", (5,)), file[f"{LAYER}mlp.experts.5.gate_proj.weight"].T)

    (run / HF_RECORD).unlink()  # as of a run that was trained
    export_run(str(run), tmp_path / "out", console=QUIET)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == file.keys()
    assert written[f"{LAYER}embed_tokens.weight"].tobytes() == file["model.embed_tokens.weight"].tobytes()
    assert written[f"{LAYER}shared_head.head.weight"].tobytes() == file["lm_head.weight"].tobytes()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 1


def _changed(folder: Path, change: Any, **attributes: Any) -> Path:
    source = fixtures.load(NAME).checkpoint(folder)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors")
    config = json.loads((source / "config.json").read_text()) | attributes
    (source / "config.json").write_text(json.dumps(config))
    return source


@pytest.mark.parametrize(("name", "shared"), [("embed_tokens", "model.embed_tokens.weight"), ("shared_head.head", "lm_head.weight")])
def test_tables_of_its_own_are_refused(name: str, shared: str, tmp_path: Path):
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors[f"{LAYER}{name}.weight"][3, 3] += 1

    with pytest.raises(DataError, match=rf"shares {shared}, and {LAYER}{name}.weight differs .*remove its tensors"):
        import_from(str(_changed(tmp_path / "source", change)), tmp_path / "run", console=QUIET)
    assert not (tmp_path / "run").exists()


def test_a_tied_head_is_the_table_there_too(tmp_path: Path):
    """The layer's head then repeats the embedding table, as the model's own does."""

    def tie(tensors: dict[str, np.ndarray]) -> None:
        del tensors["lm_head.weight"]
        tensors[f"{LAYER}shared_head.head.weight"] = tensors["model.embed_tokens.weight"].copy()

    source = _changed(tmp_path / "source", tie, tie_word_embeddings=True)
    export_run(str(import_from(str(source), tmp_path / "run", console=QUIET)), tmp_path / "out", console=QUIET)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)


def test_files_without_its_tensors_are_read_without_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """As transformers saves them; half of a layer is refused."""

    def strip(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if name.startswith(LAYER)]:
            del tensors[name]

    run = import_from(str(_changed(tmp_path / "without", strip)), tmp_path / "run", console=make_console())
    assert "config.json says mtp_layers=1, and there are no tensors of it" in " ".join(capsys.readouterr().out.split())
    export_run(str(run), tmp_path / "out", console=QUIET)
    assert config_from_hf(json.loads((tmp_path / "out" / "config.json").read_text())).spec().mtp == ()

    half = _changed(tmp_path / "half", lambda tensors: tensors.pop(f"{LAYER}enorm.weight"))
    with pytest.raises(DataError, match=rf"{LAYER}enorm.weight \(32,\) is missing"):
        import_from(str(half), tmp_path / "other", console=QUIET)
