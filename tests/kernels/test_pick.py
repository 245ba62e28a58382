"""Which path is chosen where, and the reference's sinks and chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from telamon.errors import ConfigError
from telamon.kernels.attention import Places, Scores, attention, reference_attention, visible
from telamon.kernels.attention.pick import PATHS, PLATFORMS, noted
from telamon.kernels.picks import Pick, first_that_serves
from telamon.parallel.target import target

_REFUSALS = {"fast": lambda length: None if length % 128 == 0 else f"{length} is no multiple of 128", "slow": lambda length: None}


def test_auto_takes_the_first_that_serves_and_says_why_not_the_others():
    def pick(length: int) -> Pick:
        return first_that_serves("attention", _REFUSALS, length, wanted="auto", platform="tpu")

    assert pick(256) == Pick("attention", "fast")
    assert pick(100) == Pick("attention", "slow", (("fast", "100 is no multiple of 128"),))
    assert str(pick(100)) == "attention: slow (fast: 100 is no multiple of 128)"


def test_a_path_by_name_serves_or_is_refused_with_the_reason():
    assert first_that_serves("attention", _REFUSALS, 256, wanted="slow", platform="tpu").path == "slow"
    with pytest.raises(ConfigError, match=r"train\.attention=fast cannot serve this model: 100 is no multiple of 128; auto"):
        first_that_serves("attention", _REFUSALS, 100, wanted="fast", platform="tpu")
    with pytest.raises(ConfigError, match=r"train\.attention=cudnn is not for tpu; there it is one of: auto, fast, slow"):
        first_that_serves("attention", _REFUSALS, 100, wanted="cudnn", platform="tpu")
    with pytest.raises(ConfigError, match=r"no path of attention serves on tpu: fast: 100 is no multiple"):
        first_that_serves("attention", {"fast": _REFUSALS["fast"]}, 100, wanted="auto", platform="tpu")


def test_every_platform_ends_with_the_path_that_runs_anywhere():
    assert all(order[-1] == "chunked" and set(order) <= set(PATHS) for order in PLATFORMS.values())


def test_picks_are_noted_while_a_program_is_traced_once_each():
    places = Places(jnp.arange(4)[None], jnp.ones((1, 4), jnp.int32))
    x = jnp.ones((1, 4, 1, 2))

    def layers(x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = attention(x, x, x, queries=places, keys=places, scores=Scores(1.0), aligned=True)
        return x

    with noted() as notes:
        jax.eval_shape(layers, x)
    assert [(pick.operation, pick.path) for pick in notes] == [("attention", "chunked")]
    jax.eval_shape(lambda x: layers(x), x)
    assert len(notes) == 1, "outside of `noted`, nothing is"


def test_the_target_is_the_mesh_in_force_or_else_the_device_at_hand():
    assert (target().platform, target().device_count) == ("cpu", 1)
    device = AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((2, 4), ("data", "tensor"), abstract_device=device)):
        found = target()
    assert (found.platform, found.device_kind, found.axes, found.device_count) == ("tpu", "TPU v6 lite", (("data", 2), ("tensor", 4)), 8)
    cuda = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="cuda")
    with jax.sharding.use_abstract_mesh(AbstractMesh((2,), ("data",), abstract_device=cuda)):
        assert target().platform == "gpu"


def test_a_sink_takes_its_share_of_the_softmax_and_gives_nothing():
    """One head, scores [1, 0] and a sink of 2: weights e and 1 over e + 1 + e^2. The first query sees only itself."""
    q, k = jnp.ones((1, 2, 1, 1)), jnp.array([[[[1.0]], [[0.0]]]])
    v = jnp.array([[[[10.0]], [[1.0]]]])
    mask = jnp.array([[[True, False], [True, True]]])
    out = reference_attention(q, k, v, mask, scores=Scores(1.0), sinks=jnp.array([2.0]))
    e = np.e
    np.testing.assert_allclose(out[0, :, 0, 0], [10 * e / (e + e**2), (10 * e + 1) / (e + 1 + e**2)], rtol=1e-6)
    unseen = reference_attention(q, k, v, jnp.zeros_like(mask), scores=Scores(1.0), sinks=jnp.array([2.0]))
    np.testing.assert_array_equal(unseen, 0.0)


def test_a_chunk_of_positions_sees_only_itself():
    """2048 tokens in chunks of 256 have 8 x 256 x 257 / 2 pairs; a second document counts its own positions."""
    places = Places(jnp.arange(2048)[None], jnp.ones((1, 2048), jnp.int32))
    assert np.asarray(visible(places, places, chunk=256)).sum() == 263_168
    packed = Places(jnp.array([[0, 1, 2, 0, 1, 2, 3]]), jnp.array([[1, 1, 1, 2, 2, 2, 2]]))
    seen = np.asarray(visible(packed, packed, chunk=2)[0])
    assert [np.flatnonzero(row).tolist() for row in seen] == [[0], [0, 1], [2], [3], [3, 4], [5], [5, 6]]
