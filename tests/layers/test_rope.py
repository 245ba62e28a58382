import jax.numpy as jnp
import numpy as np
import pytest
import reference_numpy

from telamon.layers.rope import RopeConfig, rotate


def _rotated(x: np.ndarray, positions: list[int], *, theta: float, dtype=jnp.float32) -> np.ndarray:
    """x [T, H] of one head at these positions."""
    frequencies = RopeConfig(theta=theta).inverse_frequencies(x.shape[-1])
    rows = jnp.asarray(x, dtype)[None, :, None, :]
    out = rotate(rows, positions=jnp.asarray([positions], jnp.int32), inverse_frequencies=frequencies)
    assert out.dtype == dtype
    return np.asarray(out.astype(jnp.float32))[0, :, 0]


@pytest.mark.parametrize("theta", [100.0, 10_000.0, 1_000_000.0])
def test_equals_rotations_pair_by_pair(theta: float):
    x = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    positions = [0, 1, 7, 100]
    expected = [reference_numpy.rotate(row.astype(np.float64), p, theta) for row, p in zip(x, positions, strict=True)]
    np.testing.assert_allclose(_rotated(x, positions, theta=theta), expected, atol=2e-5)


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
