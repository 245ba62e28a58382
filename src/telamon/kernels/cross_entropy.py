"""Cross-entropy over a large vocabulary, a chunk of tokens at a time.

The logits of the whole batch, [B, T, V] in float32, are often the largest array of a training step. Here only one chunk
exists at a time, and its gradient is taken while it exists: the backward pass neither keeps logits nor makes them again.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from telamon.kernels.matmul import product, product_t, settled, transposed
from telamon.parallel.local import own_rows

HEAD_AXES = ("embed", "vocab")
"""Logical axes of the output head, or of a tied table turned over."""

_NEVER = -1e30
"""Logit of a column that stands for no token; finite, so that its square times no probability stays 0."""


class CrossEntropy(NamedTuple):
    """Sums over the trained tokens."""

    objective: jax.Array
    """nll + z_loss * squared log-normalisers, in nats; the only part with a gradient."""
    nll: jax.Array
    """Negative log-likelihood, in nats."""
    correct: jax.Array | None
    """Tokens whose most likely next token is the target; None from a kernel that cannot tell."""


def reference_cross_entropy(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, mask: jax.Array, *, z_loss: float = 0.0, softcap: float | None = None
) -> CrossEntropy:
    """The same sums from whole logits; arguments as in `cross_entropy`."""
    logits_BTV = jnp.einsum("btd,dv->btv", hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32)
    return _sums(capped(logits_BTV, softcap), targets, mask, z_loss)


def capped(logits: jax.Array, softcap: float | None) -> jax.Array:
    """softcap * tanh(logits / softcap) (Gemma team 2024, section 2); none: logits as they are."""
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def cross_entropy(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    mask: jax.Array,
    *,
    chunk: int,
    z_loss: float = 0.0,
    softcap: float | None = None,
    vocab: int | None = None,
) -> CrossEntropy:
    """Sums of the loss over a batch, without its logits.

    Args:
        hidden: last hidden states [B, T, D], in the compute type.
        head: output matrix [D, V], float32.
        targets: token ids [B, T].
        mask: weight of each target [B, T], 0 or 1.
        chunk: tokens whose logits exist at one time on a device (rounded to whole columns of its rows).
        z_loss: weight of the squared log-normaliser (PaLM, Chowdhery et al. 2022, section 5).
        softcap: bound on the logits, see `capped`.
        vocab: columns of the head that stand for tokens; those behind get no probability. None: all.

    Returns:
        Sums, undivided; the caller divides once by the tokens of the whole step.
    """
    fixed = _Terms(chunk, float(z_loss), softcap, vocab or head.shape[1])
    objective, nll, correct = _chunked(fixed, hidden, head, targets, mask.astype(jnp.float32))
    return CrossEntropy(objective, jax.lax.stop_gradient(nll), jax.lax.stop_gradient(correct))


def most_likely(hidden: jax.Array, head: jax.Array, *, chunk: int, softcap: float | None = None, vocab: int | None = None) -> jax.Array:
    """The token with the largest logit at each place, int32 [B, T], without the batch's logits; arguments as in `cross_entropy`."""
    fixed = _Terms(chunk, 0.0, softcap, vocab or head.shape[1])

    def best(hidden: jax.Array, head: jax.Array) -> jax.Array:
        def one(_: None, x_BTD: jax.Array) -> tuple[None, jax.Array]:
            logits_MV = fixed.logits(x_BTD.reshape(-1, x_BTD.shape[-1]), head)
            return None, jnp.argmax(logits_MV, axis=-1).astype(jnp.int32).reshape(x_BTD.shape[:2])

        (chunks,) = fixed.chunks(hidden)
        found = jax.lax.scan(one, None, chunks)[1]
        return jnp.moveaxis(found, 0, 1).reshape(hidden.shape[:2])

    shared = own_rows(hidden.shape[0])
    if shared is None:
        return best(hidden, head.astype(hidden.dtype))
    owned = shared.weight(HEAD_AXES, head.shape)

    def own(hidden: jax.Array, head: jax.Array) -> jax.Array:
        return best(hidden, shared.gathered(head.astype(hidden.dtype), owned))

    return shared.call(own, (hidden, head), ins=(shared.rows, owned), outs=shared.rows)


class _Terms(NamedTuple):
    """What is fixed when a program is compiled."""

    chunk: int
    z_loss: float
    softcap: float | None
    vocab: int

    def chunks(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """[B, T, ...] -> [T / columns, B, columns, ...] each, with as many columns as `chunk` tokens allow."""
        B, T = arrays[0].shape[:2]
        columns = max((c for c in range(1, T + 1) if T % c == 0 and c * B <= max(self.chunk, B)), default=1)
        return tuple(jnp.moveaxis(x.reshape(B, T // columns, columns, *x.shape[2:]), 1, 0) for x in arrays)

    def logits(self, x_MD: jax.Array, head_DV: jax.Array) -> jax.Array:
        """[M, V] float32, with columns that stand for no token out of reach."""
        logits_MV = capped(product(x_MD, head_DV, jnp.float32), self.softcap)
        return logits_MV if self.vocab == logits_MV.shape[1] else jnp.where(self._known(logits_MV), logits_MV, _NEVER)

    def product_gradient(self, d_logits_MV: jax.Array, logits_MV: jax.Array) -> jax.Array:
        """Gradient of the head's products from that of the logits."""
        if self.softcap is None:
            return d_logits_MV
        slope_MV = 1.0 - jnp.square(logits_MV / self.softcap)
        return d_logits_MV * (slope_MV if self.vocab == logits_MV.shape[1] else jnp.where(self._known(logits_MV), slope_MV, 0.0))

    def _known(self, logits_MV: jax.Array) -> jax.Array:
        return jnp.arange(logits_MV.shape[1]) < self.vocab


def _sums(logits: jax.Array, targets: jax.Array, mask: jax.Array, z_loss: float) -> CrossEntropy:
    """Sums from logits [..., V]."""
    log_z = jax.nn.logsumexp(logits, axis=-1)
    target_logit = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    nll = jnp.sum(mask * (log_z - target_logit))
    objective = nll + z_loss * jnp.sum(mask * jnp.square(log_z)) if z_loss else nll
    correct = jnp.sum(mask * (target_logit >= jnp.max(logits, axis=-1)))
    return CrossEntropy(objective, nll, correct)


def _logit_gradient(logits: jax.Array, targets: jax.Array, mask: jax.Array, fixed: _Terms) -> jax.Array:
    """Gradient of the objective with respect to the head's products [M, V], from the logits."""
    z_loss = fixed.z_loss
    log_z = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    softmax = jnp.exp(logits - log_z)
    hit = jnp.arange(logits.shape[-1])[None, :] == targets[:, None]
    pull = softmax * (1.0 + 2.0 * z_loss * log_z) if z_loss else softmax
    return fixed.product_gradient((pull - hit) * mask[:, None], logits)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(fixed: _Terms, hidden, head, targets, mask):
    def sums(hidden, head, targets, mask):
        def one(sums, part):
            x_MD, y_M, mask_M = (leaf.reshape(-1, *leaf.shape[2:]) for leaf in part)
            return jax.tree.map(jnp.add, sums, _sums(fixed.logits(x_MD, head), y_M, mask_M, fixed.z_loss)), None

        return jax.lax.scan(one, _zero(), fixed.chunks(hidden, targets, mask))[0]

    shared = own_rows(hidden.shape[0])
    if shared is None:
        return tuple(sums(hidden, head.astype(hidden.dtype), targets, mask))
    owned = shared.weight(HEAD_AXES, head.shape)

    def own(hidden, head, targets, mask):
        return shared.total(tuple(sums(hidden, shared.gathered(head.astype(hidden.dtype), owned), targets, mask)))

    return shared.call(own, (hidden, head, targets, mask), ins=(shared.rows, owned, shared.rows, shared.rows), outs=PartitionSpec())


def _chunked_forward(fixed: _Terms, hidden, head, targets, mask):
    """The sums, and as residuals the gradients of the objective for a cotangent of 1.

    On a mesh each device adds up the head's gradient over its own rows, and one reduction leaves it the part that it owns.
    """
    shared = own_rows(hidden.shape[0])
    if shared is None:
        sums, d_hidden, d_head = _with_gradients(fixed, hidden, head.astype(hidden.dtype), targets, mask)
        return sums, (d_hidden, settled(d_head))
    owned = shared.weight(HEAD_AXES, head.shape)

    def own(hidden, head, targets, mask):
        sums, d_hidden, d_head = _with_gradients(fixed, hidden, shared.gathered(head.astype(hidden.dtype), owned), targets, mask)
        # Reduced before the backward pass begins: left to itself, the scheduler may keep the whole gradient until the end of the step.
        d_hidden, d_head = jax.lax.optimization_barrier((d_hidden, shared.scattered(d_head, owned)))
        return shared.total(sums), d_hidden, d_head

    ins, outs = (shared.rows, owned, shared.rows, shared.rows), (PartitionSpec(), shared.rows, owned)
    sums, d_hidden, d_head = shared.call(own, (hidden, head, targets, mask), ins=ins, outs=outs)
    return sums, (d_hidden, d_head)


def _with_gradients(fixed: _Terms, hidden, head, targets, mask):
    """Sums, and the gradients of the objective by hidden states and, in float32, by the head; `head` in the compute type."""

    def one(carry, part):
        sums, d_head_DV = carry
        x_MD, y_M, mask_M = (leaf.reshape(-1, *leaf.shape[2:]) for leaf in part)
        logits_MV = fixed.logits(x_MD, head)
        d_logits_MV = _logit_gradient(logits_MV, y_M, mask_M, fixed).astype(hidden.dtype)
        d_x_MD = product_t(d_logits_MV, head)
        d_head_DV += product(transposed(x_MD), d_logits_MV, jnp.float32)
        sums = jax.tree.map(jnp.add, sums, _sums(logits_MV, y_M, mask_M, fixed.z_loss))
        return (sums, d_head_DV), d_x_MD.reshape(part[0].shape)

    start = (_zero(), jnp.zeros(head.shape, jnp.float32))
    (sums, d_head), d_hidden = jax.lax.scan(one, start, fixed.chunks(hidden, targets, mask))
    return tuple(sums), jnp.moveaxis(d_hidden, 0, 1).reshape(hidden.shape), d_head


def _chunked_backward(fixed: _Terms, residuals, cotangents):
    d_hidden, d_head = residuals
    by = cotangents[0]  # nll and correct are measurements: their cotangents are zero by stop_gradient
    return (d_hidden * by.astype(d_hidden.dtype), d_head * by, None, None)


_chunked.defvjp(_chunked_forward, _chunked_backward)


def _zero() -> CrossEntropy:
    return CrossEntropy(*(jnp.zeros((), jnp.float32),) * 3)
