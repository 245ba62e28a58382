import jax.numpy as jnp
import numpy as np
import pytest
import reference_numpy

from telamon.layers.rope import LinearScaling, Llama3Scaling, Pairs, RopeConfig, RopeScaling, YarnScaling, rotate, rotation, yarn_growth


def _rotated(x: np.ndarray, positions: list[int], *, theta: float, dtype=jnp.float32, pairs: Pairs = "halves") -> np.ndarray:
    """x [T, H] of one head at these positions."""
    frequencies = RopeConfig(theta=theta).inverse_frequencies(x.shape[-1])
    rows = jnp.asarray(x, dtype)[None, :, None, :]
    out = rotate(rows, rotation(jnp.asarray([positions], jnp.int32), frequencies), pairs)
    assert out.dtype == dtype
    return np.asarray(out.astype(jnp.float32))[0, :, 0]


@pytest.mark.parametrize("theta", [100.0, 10_000.0, 1_000_000.0])
def test_equals_rotations_pair_by_pair(theta: float):
    x = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    positions = [0, 1, 7, 100]
    expected = [reference_numpy.rotate(row.astype(np.float64), p, theta) for row, p in zip(x, positions, strict=True)]
    np.testing.assert_allclose(_rotated(x, positions, theta=theta), expected, atol=2e-5)


@pytest.mark.parametrize(("positions", "atol"), [([0, 1, 7, 100], 2e-5), ([8_191, 8_192, 131_071], 0.02)])
def test_interleaved_pairs_are_neighbours_that_stay_where_they_were(positions: list[int], atol: float):
    """As complex numbers x[2i] + i x[2i + 1] times e^(i angle) in float64. A float32 angle of 131,071 radians is rounded by 0.008."""
    x = np.random.default_rng(0).standard_normal((len(positions), 8)).astype(np.float32)
    angles = np.outer(positions, 10_000.0 ** (-np.arange(0, 8, 2) / 8))
    turned = x.astype(np.float64).view(np.complex128) * np.exp(1j * angles)
    np.testing.assert_allclose(_rotated(x, positions, theta=10_000.0, pairs="interleaved"), turned.view(np.float64), atol=atol)


def test_interleaved_pairs_are_halves_in_another_order():
    """So a permutation of the features turns one into the other, at any position and bit for bit."""
    x = np.random.default_rng(2).standard_normal((3, 8)).astype(np.float32)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    interleaved = _rotated(x, [1, 5_000, 1_000_000], theta=500_000.0, pairs="interleaved")
    np.testing.assert_array_equal(interleaved[:, order], _rotated(x[:, order], [1, 5_000, 1_000_000], theta=500_000.0))


def test_neighbouring_positions_differ_under_bfloat16():
    """In bfloat16 257 rounds to 256 and 4097 to 4096; the angles must be made in float32."""
    unit = np.tile([1.0] * 4 + [0.0] * 4, (4, 1))
    at = _rotated(unit, [256, 257, 4096, 4097], theta=10_000.0, dtype=jnp.bfloat16)
    assert np.abs(at[0] - at[1]).max() > 0.1
    # The fastest pair turns one radian a position: (cos 4097, sin 4097), where 4096 would give (0.80399, -0.59464).
    np.testing.assert_allclose([at[3, 0], at[3, 4]], [0.93477, 0.35525], atol=1e-2)


def test_scores_depend_on_the_distance_alone():
    rng = np.random.default_rng(1)
    q, k = rng.standard_normal((2, 1, 16)).astype(np.float32)

    def score(q_at: int, k_at: int) -> float:
        return (_rotated(q, [q_at], theta=10_000.0) @ _rotated(k, [k_at], theta=10_000.0).T).item()

    assert score(5, 2) == pytest.approx(score(1003, 1000), abs=1e-3)
    assert abs(score(5, 2) - score(5, 3)) > 1e-2


def _frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    return RopeConfig(theta=theta, scaling=scaling).inverse_frequencies(head_dim)


def test_llama3_keeps_short_wavelengths_and_stretches_long_ones():
    """Head size 64, base 5e5, factor 8 of 8192 tokens: worked out from the published formula. Unscaled, [15] is 0.00213112."""
    scaled = _frequencies(64, 5e5, Llama3Scaling(factor=8.0))
    np.testing.assert_allclose(scaled[14:19], [0.00321145, 0.00137189, 0.00052485, 0.00017851, 0.00007785], rtol=1e-5, atol=5e-9)
    plain = _frequencies(64, 5e5)
    np.testing.assert_array_equal(scaled[:15], plain[:15])
    np.testing.assert_allclose(scaled[18:], plain[18:] / 8, rtol=1e-6)


def test_llama3_without_a_band_between_keeps_or_stretches_whole():
    scaled, plain = _frequencies(64, 5e5, Llama3Scaling(factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0)), _frequencies(64, 5e5)
    kept = 2 * np.pi / plain < 8192
    assert 0 < kept.sum() < 32
    np.testing.assert_allclose(scaled, np.where(kept, plain, plain / 16), rtol=1e-6)


def test_linear_divides_all():
    np.testing.assert_allclose(_frequencies(16, 1e6, LinearScaling(factor=8.0)), _frequencies(16, 1e6) / 8, rtol=1e-6)


@pytest.mark.parametrize(
    ("scaling", "theta", "first", "last"),
    [
        (YarnScaling(factor=32.0, original_length=4096, truncate=False), 150_000.0, 8.092779, 17.398025),
        (YarnScaling(factor=40.0, original_length=4096), 10_000.0, 10, 23),
        (YarnScaling(factor=32.0, original_length=4096, beta_fast=1.0), 50_000.0, 19, 20),
    ],
)
def test_yarn_leaves_the_published_band(scaling: YarnScaling, theta: float, first: float, last: float):
    """The ends of the band, in pairs of a head of 64, of GPT-OSS, of DeepSeek V3 and of Kimi K2."""
    scaled, plain = _frequencies(64, theta, scaling), _frequencies(64, theta)
    slow = np.clip((np.arange(32) - first) / (last - first), 0, 1)
    np.testing.assert_allclose(scaled, plain / scaling.factor * slow + plain * (1 - slow), rtol=1e-5)


def test_yarn_sharpens_by_its_growth():
    """m(8), m(32) and m(40); a given factor counts first; equal mscales cancel out."""
    for factor, growth in ((8.0, 1.2079441541679836), (32.0, 1.3465735902799727), (40.0, 1.3688879454113936)):
        assert YarnScaling(factor=factor, original_length=4096).amplitude == pytest.approx(growth, rel=1e-12)
    assert yarn_growth(40.0, 0.707) ** 2 == pytest.approx(1.5896261651208736, rel=1e-12)
    assert yarn_growth(0.5) == 1.0
    assert YarnScaling(factor=40.0, original_length=4096, mscale=0.707, mscale_all_dim=0.707).amplitude == 1.0
    assert YarnScaling(factor=40.0, original_length=4096, attention_factor=1.5).amplitude == 1.5


def test_an_amplitude_multiplies_what_is_rotated():
    x = np.random.default_rng(0).standard_normal((1, 3, 2, 8)).astype(np.float32)
    positions, frequencies = jnp.arange(3)[None], _frequencies(8, 1e4)
    plain = rotate(jnp.asarray(x), rotation(positions, frequencies))
    sharp = rotate(jnp.asarray(x), rotation(positions, frequencies, amplitude=1.25))
    np.testing.assert_allclose(sharp, 1.25 * plain, rtol=1e-5, atol=1e-6)
