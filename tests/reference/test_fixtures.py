"""Every fixture is whole, small, and says what made it and that it would show a mistake."""

import json
from pathlib import Path

import numpy as np
import pytest
from reference.fixtures import FOLDER, load, names
from safetensors import safe_open

MOVE = 1e-2
EACH, ALL = 300_000, 20_000_000
LOGITS = ("logits", "packed_logits", "padded_logits", "long_logits", "jump_logits", "decode_logits")


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "numpy") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118 - it's no mapping
    return shapes


def test_all_fixtures_together_are_small() -> None:
    assert names()
    assert sum(_size(FOLDER / name) for name in names()) < ALL


@pytest.mark.parametrize("name", names())
def test_fixture_is_small_and_says_what_made_it(name: str) -> None:
    fixture = load(name)
    assert _size(fixture.folder) < EACH
    assert fixture.meta["name"] == name
    assert fixture.meta["exercises"]
    assert set(fixture.meta["versions"]) == {"torch", "transformers", "numpy", "python"}


@pytest.mark.parametrize("name", names())
def test_checkpoint_is_whole(name: str, tmp_path: Path) -> None:
    fixture = load(name)
    folder = fixture.checkpoint(tmp_path / "model")
    shapes = _shapes(folder)
    assert set(fixture.gradients()) <= set(shapes)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        assert set(json.loads(index.read_text())["weight_map"]) == set(shapes)
    for parameter, (norm, where, values) in fixture.gradients().items():
        assert where.max() < np.prod(shapes[parameter])
        assert np.linalg.norm(values) <= norm * (1 + 1e-6)


@pytest.mark.parametrize("name", names())
def test_answers_are_finite_and_of_the_shapes_described(name: str) -> None:
    e = load(name).expected
    assert all(np.isfinite(e[key]).all() and e[key].dtype == np.float32 for key in LOGITS)
    V = e["logits"].shape[-1]
    shapes = {key: e[key].shape for key in LOGITS}
    assert shapes == {
        "logits": (2, 24, V),
        "packed_logits": (24, V),
        "padded_logits": (24, V),
        "long_logits": (4, 8, V),
        "jump_logits": (8, V),
        "decode_logits": (16, V),
    }
    assert list(e["packed_lengths"]) == [9, 3, 12]
    assert e["ids"].max() < V
    np.testing.assert_array_equal(e["decode_logits"].argmax(-1), e["decode_ids"])
    np.testing.assert_allclose(e["padded_logits"], e["logits"][1], atol=2e-5)
    log_p = e["logits"] - np.log(np.exp(e["logits"].astype(np.float64)).sum(-1, keepdims=True))
    picked = np.take_along_axis(log_p[:, :-1], e["ids"][:, 1:, None], axis=-1)
    np.testing.assert_allclose(-picked.mean(), e["loss"], rtol=1e-5)


@pytest.mark.parametrize("name", [name for name in names() if load(name).meta["controls"]])
def test_mistakes_would_be_seen(name: str) -> None:
    controls = load(name).meta["controls"]
    assert controls["swap"]["smallest_move"] > MOVE
    assert all(found["move"] > MOVE for found in controls["without"])
    assert max(controls["rounding"].values()) < 1e-4
    config = load(name).config
    routed = {"num_local_experts", "num_experts", "n_routed_experts"} & set(config.get("text_config", config))
    assert bool(routed) == ("router_margin" in controls)
    assert controls.get("router_margin", 1) > 1e-4


def test_a_layer_for_multi_token_prediction_is_answered_for():
    fixture = load("deepseek-v3-mtp")
    e = fixture.expected
    assert e["mtp_logits"].shape == (2, 23, 96)
    log_p = e["mtp_logits"] - np.log(np.exp(e["mtp_logits"].astype(np.float64)).sum(-1, keepdims=True))
    picked = np.take_along_axis(log_p[:, :-1], e["ids"][:, 2:, None], axis=-1)
    np.testing.assert_allclose(-picked.mean(), e["mtp_loss"], rtol=1e-5)
    assert set(e["mtp_grad_names"]) <= set(_shapes(fixture.folder))
    assert (e["mtp_grad_norms"] > 0).all()
