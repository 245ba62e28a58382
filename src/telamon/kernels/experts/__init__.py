"""Grouped matmul: rows sorted by expert, each times its expert's matrix. One function, several paths.

Which path runs is decided where a program is traced, from the device it is for and from what is asked of it (`pick`). Each path
brings two products, forward and the weights' gradient; how they make a function with gradients is the same for all.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from telamon.kernels.experts.pick import PATHS, PLATFORMS, Path, choose
from telamon.kernels.experts.rule import SAVED, Request, on_one_device
from telamon.parallel.target import target

__all__ = ["PLATFORMS", "SAVED", "Path", "Request", "choose", "grouped_matmul", "path_for"]


def grouped_matmul(x: jax.Array, w: jax.Array, sizes: jax.Array, *, path: str = "auto") -> jax.Array:
    """Each row of x times the matrix of its expert.

    Args:
        x: rows [M, K] in the compute type: first those of expert 0, then those of expert 1, and so on.
        w: the experts' matrices [E, K, N] in float32; cast to the type of `x`. Their gradient is float32, never rounded.
        sizes: rows of each expert [E], integers whose sum is at most M. Rows behind the last expert's are nobody's: they give
            zeros and get a gradient of zero. An expert without rows gets a gradient of exact zeros.
        path: a name of `pick.PATHS`, or `auto`, the first that serves.

    Returns:
        [M, N] in the type of `x`.

    Raises:
        ConfigError: the named path cannot do what is asked, with the reason.
    """
    (M, K), (E, _, N) = x.shape, w.shape
    assert w.shape[1] == K and sizes.shape == (E,), (x.shape, w.shape, sizes.shape)
    picked = choose(Request(target(), M, K, N, E, str(x.dtype), on_one_device()), path)
    return _grouped(picked.path, x, w, sizes.astype(jnp.int32))


def path_for(M: int, K: int, N: int, E: int, *, dtype: str, path: str = "auto") -> Path:
    """The products themselves, for who makes gradients of its own: those for x [M, K] in `dtype`, w [E, K, N] and [E, N, K] in either type.

    Raises:
        ConfigError: see `grouped_matmul`.
    """
    return PATHS[choose(Request(target(), M, K, N, E, dtype, on_one_device()), path).path]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(path: str, x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    return _forward(path, x, w, sizes)[0]


def _forward(path: str, x: jax.Array, w: jax.Array, sizes: jax.Array):
    out = PATHS[path].product(x, w, sizes, transposed=False)
    # A policy that saves products would not see those in a loop or a kernel.
    return checkpoint_name(out, SAVED), (x, w, sizes)


def _backward(path: str, residuals, dy: jax.Array):
    x, w, sizes = residuals
    return PATHS[path].product(dy, w, sizes, transposed=True), PATHS[path].weight_gradient(x, dy, sizes), None


_grouped.defvjp(_forward, _backward)
