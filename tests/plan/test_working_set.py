"""The rule for what is live at one time, on programs small enough to count by hand."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from telamon.plan.working_set import ROWS, Size, aside, most, size_of, working_set


def _moments(function: Callable[..., Any], *shapes: tuple[int, ...], handed_on: int = 0) -> tuple[Size, ...]:
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return working_set(jax.make_jaxpr(function)(*arrays).jaxpr, handed_on=handed_on)


def test_an_array_grows_with_rows_where_they_are_in_its_size():
    assert size_of(jax.ShapeDtypeStruct((ROWS, 5), jnp.bfloat16)) == Size(row=10)
    assert size_of(jax.ShapeDtypeStruct((7, 5), jnp.float32)) == Size(fixed=140)


@pytest.mark.parametrize(
    "function, expected",
    [
        (lambda x, w: jnp.tanh(x) * 2.0, Size(row=32)),  # fused: only the result
        (lambda x, w: x @ w @ w, Size(row=64)),  # the first product is live while the second is made
        (lambda x, w: x @ w @ w @ w, Size(row=64)),  # and gone after it
        (lambda x, w: jnp.tanh(x) @ w, Size(row=64)),  # a product reads its operand from memory
        (lambda x, w: jnp.tanh(x @ w), Size(row=32)),  # a fused result takes its operand's place
        (lambda x, w: jnp.sum(jnp.tanh(x), axis=1), Size(row=4)),  # a sum is made with what it sums
        (lambda x, w: (x @ w) + jnp.tanh(x @ w).T.T, Size(row=64)),  # both products are needed for the sum
    ],
)
def test_moments_of_small_programs(function: Callable[..., Any], expected: Size):
    assert _moments(function, (ROWS, 8), (8, 8)) == (expected,)


def test_a_loop_holds_its_carry_its_stack_and_its_body():
    def loop(x: jax.Array, w: jax.Array) -> Any:
        return jax.lax.scan(lambda carry, _: (carry @ w, jnp.sum(carry, axis=1)), x, None, length=5)

    # Carry 32 and the stacked sums 5 x 4 a row; in the body the next carry 32 and one sum 4.
    assert _moments(loop, (ROWS, 8), (8, 8)) == (Size(row=32 + 20 + 36),)


def test_a_product_that_is_added_to_what_a_loop_carries_is_never_there_by_itself():
    def summed(x: jax.Array, w: jax.Array) -> Any:
        return jax.lax.scan(lambda total, _: (total + x.T @ x, None), w, None, length=5)[0]

    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((ROWS, 8), (8, 8))]
    jaxpr = jax.make_jaxpr(summed)(*arrays).jaxpr
    assert working_set(jaxpr) == (Size(fixed=2 * 256),)  # what is carried, and the product
    assert working_set(jaxpr, adds_in_place=True) == (Size(fixed=256),)


def test_what_is_put_aside_is_one_operation_whose_own_needs_come_on_top():
    """Whatever it does inside, it reads one array and gives one; what it works with is for another to say."""
    apart = aside(lambda x: jnp.sin(x @ (x.T @ x)))
    moments = _moments(lambda x, w: apart(x @ w) @ w, (ROWS, 8), (8, 8))
    # Its result and its operand while it works; then result and product, 64 a row too, which is never more.
    assert moments[0] == Size(row=64, aside=1)
    assert most(moments, rows=10, aside=1000) == 1640
    assert most(moments, rows=10) == 640


def test_what_is_handed_on_does_not_stay():
    def gradients(x: jax.Array, w: jax.Array) -> Any:
        return w @ w, w.T @ w, x @ w

    assert _moments(gradients, (ROWS, 8), (8, 8), handed_on=2) == (Size(row=32), Size(fixed=256))
    assert most(_moments(gradients, (ROWS, 8), (8, 8)), 1) == 32 + 2 * 256


def test_branches_count_as_the_largest():
    def either(x: jax.Array, w: jax.Array) -> Any:
        return jax.lax.cond(w[0, 0] > 0, lambda: x @ w @ w, lambda: x)

    assert most(_moments(either, (ROWS, 8), (8, 8)), 1000) == 1000 * (32 + 64) + 4  # the condition is live too
