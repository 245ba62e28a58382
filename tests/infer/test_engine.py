"""Generation against the training forward, prompts alone against prompts in company."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telamon.config.load import load_run
from telamon.config.schema import MeshConfig
from telamon.errors import ConfigError
from telamon.infer.engine import Generator, pad
from telamon.infer.sampling import RowSampling, Sampling
from telamon.models.decoder import Numerics
from telamon.models.weights import Model, flatten
from telamon.parallel.mesh import build_mesh

PROMPTS = [[5, 6, 7], [1, 2, 3, 4, 0, 9, 10, 11], [12], [5, 6, 7, 8, 9]]
GREEDY = Sampling(temperature=0)
VARIED = Sampling(temperature=1.0, top_k=20, top_p=0.95)


@pytest.fixture(scope="module")
def generator(model, weights):
    return Generator(model, weights, eos_ids=())


def tokens_of(generator, prompts, *, max_tokens=20, sampling: Sampling | list[Sampling] = VARIED, seed=0):
    session = generator.start(prompts, max_tokens=max_tokens, sampling=sampling, seed=seed)
    while session.running:
        session.advance()
    return session.tokens


@pytest.fixture(scope="module")
def forward(model, weights):
    """Logits of the training forward: no cache, whole rows at once."""

    @jax.jit
    def run(tokens, mask):
        decoder = model.bind(weights)
        return decoder.logits(decoder(tokens, positions=positions_of(mask), segments=mask).hidden)

    return lambda tokens, mask: np.asarray(run(tokens, mask))


@pytest.fixture(scope="module")
def cached_forward(model, weights):
    """The same with a cache of 32 places: logits, and the cache."""

    @jax.jit
    def run(tokens, positions, segments, cache):
        decoder = model.bind(weights)
        if cache is None:
            cache = decoder.init_cache(batch=tokens.shape[0], length=32)
        output = decoder(tokens, positions=positions, segments=segments, cache=cache)
        return decoder.logits(output.hidden), output.cache

    return run


def positions_of(mask):
    return jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)


def test_greedy_tokens_are_the_likeliest_of_the_full_forward_at_each_step(generator, forward):
    drawn = tokens_of(generator, PROMPTS, sampling=GREEDY)
    # Padding after the tokens cannot be seen by any of them, whatever the mask does.
    logits = forward(*pad([prompt + new for prompt, new in zip(PROMPTS, drawn, strict=True)], rows=4, width=28))
    for prompt, new, row in zip(PROMPTS, drawn, logits, strict=True):
        assert len(new) == 20
        assert new == row[len(prompt) - 1 : len(prompt) + 19].argmax(axis=-1).tolist()


@pytest.mark.parametrize("prompt", [[5, 6, 7], [5, 0, 0]], ids=["plain", "the pad id is a real token"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pads", [0, 3, 7])
def test_padding_changes_nothing(generator, forward, cached_forward, prompt, side, pads):
    """Logits at the real tokens, in the training forward, in the prefill and after a decoded token."""
    tokens, mask = pad([prompt], rows=1, width=3 + pads, side=side)
    real = mask[0] == 1
    bare = forward(*pad([[*prompt, 9]], rows=1, width=4))[0]
    np.testing.assert_allclose(forward(tokens, mask)[0][real], bare[:3], atol=1e-5)

    logits, cache = cached_forward(tokens, positions_of(mask), mask, None)
    np.testing.assert_allclose(logits[0][real], bare[:3], atol=1e-5)
    logits, _ = cached_forward(np.array([[9]], np.int32), np.array([[3]], np.int32), np.ones((1, 1), np.int32), cache)
    np.testing.assert_allclose(logits[0, 0], bare[3], atol=1e-5)

    state = generator.prefill(tokens, mask, length=32)
    np.testing.assert_allclose(state.logits[0], bare[2], atol=1e-5)
    logits, _ = cached_forward(np.array([[9]], np.int32), np.asarray(state.position)[:, None], np.ones((1, 1), np.int32), state.cache)
    np.testing.assert_allclose(logits[0, 0], bare[3], atol=1e-5)


def test_a_prompt_gets_the_same_tokens_alone_as_in_a_batch(generator):
    together = tokens_of(generator, PROMPTS)
    assert together == [tokens_of(generator, [prompt])[0] for prompt in PROMPTS]
    assert tokens_of(generator, PROMPTS[::-1]) == together[::-1]


def test_a_seed_reproduces_and_another_seed_differs(generator):
    first = tokens_of(generator, PROMPTS, seed=3)
    assert tokens_of(generator, PROMPTS, seed=3) == first
    assert tokens_of(generator, PROMPTS, seed=4) != first


def test_the_same_prompt_given_twice_gets_two_continuations(generator):
    one, other = tokens_of(generator, [[5, 6, 7], [5, 6, 7]])
    assert one != other


@pytest.mark.parametrize("max_tokens", [1, 15, 16, 17, 40])
def test_the_number_of_tokens_is_kept_to_and_chunks_leave_no_trace(generator, max_tokens):
    longest = tokens_of(generator, PROMPTS, max_tokens=40)
    assert tokens_of(generator, PROMPTS, max_tokens=max_tokens) == [tokens[:max_tokens] for tokens in longest]


def test_each_token_is_drawn_afresh(generator):
    """At a temperature at which noise alone decides, no chunk repeats the noise of the one before."""
    (drawn,) = tokens_of(generator, [[5]], max_tokens=48, sampling=Sampling(temperature=1e6))
    assert len({tuple(drawn[start : start + 16]) for start in (0, 16, 32)}) == 3
    assert len(set(drawn[:16])) > 8


@pytest.mark.parametrize("number", [1, 2])
def test_a_row_ends_at_any_eos_and_the_others_go_on(model, weights, generator, number):
    """A turn's end and a document's end are two tokens that end a text."""
    endless = tokens_of(generator, PROMPTS)
    ends = [endless[0][5], endless[1][9]][:number]
    session = Generator(model, weights, eos_ids=ends).start(PROMPTS, max_tokens=20, sampling=VARIED)
    while session.running:
        session.advance()
    for tokens, finish, without in zip(session.tokens, session.finish, endless, strict=True):
        first = min((without.index(eos) for eos in ends if eos in without), default=None)
        assert tokens == without[:first]
        assert finish == ("length" if first is None else "eos")
    assert session.finish.count("eos") >= number and "length" in session.finish


def test_ids_beyond_the_tokenizers_are_never_drawn(model, weights):
    drawn = tokens_of(Generator(model, weights, eos_ids=(), vocab_size=40), PROMPTS, sampling=Sampling(temperature=5.0), max_tokens=60)
    assert max(map(max, drawn)) < 40


def test_a_prompt_with_an_id_that_the_table_has_no_row_for_is_refused(model, generator):
    """A tokenizer that grew and a table that did not; a look-up would take the last row."""
    rows = model.spec.vocab_size
    generator.start([[rows - 1]], max_tokens=1, sampling=GREEDY)
    with pytest.raises(ConfigError, match=f"the text has the token {rows}, and the model has {rows} rows"):
        generator.start([[1], [2, rows]], max_tokens=1, sampling=GREEDY)


def test_every_row_may_have_its_own_settings(generator):
    mixed = tokens_of(generator, PROMPTS, sampling=[GREEDY, VARIED, GREEDY, VARIED])
    greedy, varied = tokens_of(generator, PROMPTS, sampling=GREEDY), tokens_of(generator, PROMPTS)
    assert mixed == [greedy[0], varied[1], greedy[2], varied[3]]


def test_a_mesh_gives_the_same_tokens(model, weights, generator):
    """Eight devices share the weights; four prompts do not fill them, so spare rows are added and not seen."""
    mesh = build_mesh(MeshConfig())
    assert mesh.size == 8
    spread = jax.device_put(weights, model.shardings(mesh))
    assert tokens_of(Generator(model, spread, eos_ids=(), mesh=mesh), PROMPTS) == tokens_of(generator, PROMPTS)


def test_weights_rounded_once_give_what_rounding_at_every_use_gives(model, weights):
    low = Model(model.spec, Numerics(dtype="bfloat16"))
    generator = Generator(low, weights, eos_ids=())
    kept = {path: x.dtype.name for path, x in flatten(generator.weights).items()}
    assert {kept["embedding"], kept["stacks.0.blocks.0.mixer.query"], kept["stacks.0.blocks.0.ffn.down"]} == {"bfloat16"}
    assert kept["norm.scale"] == "float32"
    tokens, mask = pad(PROMPTS, rows=4, width=8)
    by_use = jax.jit(lambda weights: _logits(low.bind(weights), tokens, mask))(weights)
    np.testing.assert_array_equal(jax.jit(lambda weights: _logits(low.bind(weights), tokens, mask))(generator.weights), by_use)


def _logits(decoder, tokens, mask):
    return decoder.logits(decoder(tokens, positions=positions_of(mask), segments=mask).hidden)


def test_nothing_of_the_size_of_the_cache_is_copied():
    """Of sixteen layers a compiled loop may hold one layer's keys and values beside the cache, but not all keys or all values."""
    spec = load_run(overrides=["model.preset=tiny-qwen3", "model.vocab_size=64", "model.n_layers=16"]).config.model.spec()
    deep = Model(spec, Numerics(dtype="bfloat16"))
    generator = Generator(deep, jax.jit(deep.init)(jax.random.key(0)), eos_ids=())
    prompts = pad([[1]] * 4, rows=4, width=4)
    state = jax.eval_shape(lambda: generator.prefill(*prompts, length=4096))
    settings = {"stopped": np.zeros(4, bool), "keys": np.zeros((4, 2), np.uint32), "rows": RowSampling.stack([GREEDY] * 4), "limit": 16}
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.cache.layers))
    prefill = generator._prefill.lower(generator.weights, *prompts, length=4096).compile().memory_analysis()
    decode = generator._decode.lower(generator.weights, state=state, **settings).compile().memory_analysis()
    assert prefill is not None and decode is not None
    assert prefill.temp_size_in_bytes < size / 4
    assert decode.temp_size_in_bytes < size / 4
    assert decode.alias_size_in_bytes > size
