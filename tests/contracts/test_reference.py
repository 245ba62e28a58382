"""Every family against transformers: what must hold for each, on each fixture.

Tolerances: logits within 1e-4, absolute, in float32; loss and gradients within 1e-4, relative (to the tensor's norm, for an entry).
"""

from collections.abc import Iterator
from typing import Any

import checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import fixtures

NAMES = checkpoints.names()
# A fixture whose files another one answers for computes the same; its config is another spelling (see test_configs.py).
OWN = [name for name in NAMES if "expected.npz" not in fixtures.load(name).meta["same_as"]]

LOGITS, RELATIVE = 1e-4, 1e-4


def _together(name: str, *rest: str) -> Any:
    """A fixture's tests share one worker, and so its compiled programs."""
    return pytest.param(name, *rest, marks=pytest.mark.xdist_group(f"fixture {name}"))


def _questions() -> Iterator[Any]:
    for name in OWN:
        yield from (_together(name, rows) for rows in ("logits", "packed", "padded", "long"))
        # Transformers' windows and chunks go by place in the row and ours by position, which in these rows are not alike.
        mixers = [block.mixer for block in checkpoints.config(fixtures.load(name)).spec().blocks]
        if all(mixer.attention_window is None and mixer.attention_chunk is None for mixer in mixers):
            yield _together(name, "jump")


@pytest.mark.parametrize(("name", "rows"), list(_questions()))
def test_logits(name: str, rows: str):
    """Plain rows; three documents in one row; a left-padded row; positions from 0, 7, 100 and 4095 on; positions that jump."""
    case = checkpoints.load(name)
    theirs = case.fixture.expected["logits" if rows == "logits" else f"{rows}_logits"]
    ours = getattr(checkpoints.ask(name), rows)
    assert np.abs(ours - theirs).max() < LOGITS, checkpoints.report(name, ours, theirs)


@pytest.mark.parametrize("name", [_together(name) for name in OWN])
def test_loss_and_gradients(name: str):
    case, ours = checkpoints.load(name), checkpoints.ask(name)
    assert ours.loss == pytest.approx(float(case.fixture.expected["loss"]), rel=RELATIVE)
    theirs = {case.config.canonical(parameter): gradient for parameter, gradient in case.fixture.gradients().items()}
    buffers = checkpoints.buffers(case)
    assert set(theirs) - {None} | buffers == set(ours.gradients)
    for parameter, gradient in ours.gradients.items():
        if parameter in buffers:
            assert not gradient.any(), parameter
            continue
        norm, index, values = theirs[parameter]
        assert np.linalg.norm(gradient.astype(np.float64)) == pytest.approx(norm, rel=RELATIVE), parameter
        np.testing.assert_allclose(gradient.reshape(-1)[index], values, rtol=0, atol=RELATIVE * norm, err_msg=parameter)


@pytest.mark.parametrize("name", [_together(name) for name in OWN])
def test_decoding_through_the_cache(name: str):
    """Token by token: the prompt's last logits and every later step's are transformers' own, and so are the greedy tokens."""
    case = checkpoints.load(name)
    e = case.fixture.expected
    tokens = np.concatenate([e["prompt_ids"], e["decode_ids"]]).astype(np.int32)

    @jax.jit
    def decode(weights):
        decoder = case.model.bind(weights)

        def step(cache, inputs):
            token, position = inputs
            output = decoder(token[None, None], positions=position[None, None], segments=jnp.ones((1, 1), jnp.int32), cache=cache)
            return output.cache, decoder.logits(output.hidden)[0, 0]

        cache = decoder.init_cache(batch=1, length=len(tokens))
        return jax.lax.scan(step, cache, (jnp.asarray(tokens), jnp.arange(len(tokens))))[1]

    steps = np.asarray(decode(case.weights))[len(e["prompt_ids"]) - 1 : -1]
    assert np.abs(steps - e["decode_logits"]).max() < LOGITS, checkpoints.report(name, steps, e["decode_logits"])
    assert steps.argmax(axis=-1).tolist() == e["decode_ids"].tolist()


@pytest.mark.parametrize(
    "name", [_together(name) for name in ("llama-yarn", "gemma3", "olmo3-yarn-trained", "gpt2", "llama4-maverick", "deepseek-v3")]
)
def test_the_stream_layer_by_layer(name: str):
    """At far positions; a rotary fault would be seen at its first layer. This is what a failure of the tests above reports."""
    theirs = checkpoints.case_streams(name)
    ours = checkpoints.stream_sizes(name)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    assert "layer 0" in checkpoints.report(name, ours, ours)


def _swaps(tensors: dict[str, np.ndarray]) -> Iterator[tuple[str, str]]:
    names = sorted(tensors)
    for i, one in enumerate(names):
        yield from ((one, other) for other in names[i + 1 :] if tensors[one].shape == tensors[other].shape)


@pytest.mark.parametrize("name", [_together(name) for name in ("llama-biases", "gemma3", "olmo3", "gpt2", "gpt-oss", "llama4-scout")])
def test_exchanging_any_two_tensors_of_one_shape_would_be_noticed(name: str):
    """The control: these models are random enough for a wrong name to fail the tests above by a hundred tolerances."""
    case = checkpoints.load(name)
    arrays = checkpoints.tensors_of(case.fixture, case.config)
    pairs = list(_swaps(arrays))
    ids = jnp.asarray(case.fixture.expected["ids"], jnp.int32)
    places, ones = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape), jnp.ones_like(ids)

    @jax.jit
    def logits(weights):
        decoder = case.model.bind(weights)
        return decoder.logits(decoder(ids, positions=places, segments=ones).hidden)

    right = np.asarray(logits(case.weights))
    chosen = [pairs[i] for i in np.random.default_rng(0).permutation(len(pairs))[:60]]
    for one, other in chosen:
        swapped = arrays | {one: arrays[other], other: arrays[one]}
        moved = np.abs(np.asarray(logits(checkpoints.to_tree(case.model, case.tensors, swapped))) - right).max()
        assert moved > 1e-2, (one, other)
