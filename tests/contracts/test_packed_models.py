"""Whole models with weights in few bits, each of a registered family: the logits, and what an import makes of them.

Tolerance: logits within 1e-4, absolute, in float32 from the unpacked weights, as for weights that were never packed.
"""

import hashlib
import json
from pathlib import Path

import checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import fixtures

from telamon.config.load import load_run
from telamon.hub.exporting import export_run
from telamon.hub.importing import import_from
from telamon.hub.opening import open_source
from telamon.hub.safetensors_folder import SafetensorsFolder
from telamon.models.hf import config_from_hf, hf_families
from telamon.models.weights import Model
from telamon.watch.log import make_console

PACKED = fixtures.FOLDER.parent / "packed"
LOGITS = 1e-4


def _names() -> list[str]:
    folders = (folder for folder in sorted(PACKED.iterdir()) if (folder / "expected.npz").exists())
    return [folder.name for folder in folders if json.loads((folder / "config.json").read_text())["model_type"] in hf_families()]


@pytest.mark.parametrize("name", _names())
def test_logits_are_those_of_the_unpacked_weights(name: str):
    with open_source(str(PACKED / name)) as source:
        config = config_from_hf(source.config)
        model = Model(config.spec())
        arrays = {config.canonical(tensor): source.read(tensor) for tensor in source.tensors}
    weights = checkpoints.to_tree(model, config.tensors(model), {tensor: array for tensor, array in arrays.items() if tensor is not None})
    expected = np.load(PACKED / name / "expected.npz")
    tokens = jnp.asarray(expected["ids"], jnp.int32)

    @jax.jit
    def logits(weights):
        decoder = model.bind(weights)
        places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return decoder.logits(decoder(tokens, positions=places, segments=jnp.ones_like(tokens)).hidden)

    assert np.abs(np.asarray(logits(weights)) - expected["logits"]).max() < LOGITS


@pytest.mark.parametrize("name", _names())
def test_an_import_is_exported_unpacked(name: str, tmp_path: Path):
    """In bfloat16, each number the one that was packed, and nothing in config.json that says otherwise."""
    run = import_from(str(PACKED / name), tmp_path / "run", console=make_console(quiet=True))
    assert load_run(run / "config.yaml").config.train.compute_dtype == "bfloat16"
    export_run(str(run), tmp_path / "out", console=make_console(quiet=True))
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in written
    assert written["torch_dtype"] == "bfloat16"
    expected = json.loads((PACKED / name / "meta.json").read_text())["sha256"]
    with SafetensorsFolder(tmp_path / "out") as source:
        assert {tensor: hashlib.sha256(source.read(tensor).tobytes()).hexdigest() for tensor in source.tensors} == expected
