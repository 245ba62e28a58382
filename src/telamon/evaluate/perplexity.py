"""Perplexity of a text: what training's evaluation computes, over a text of one's own."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from telamon.data.packing import Batch
from telamon.data.tokenizer import TextTokenizer
from telamon.errors import ConfigError, DataError
from telamon.infer.engine import check_known
from telamon.infer.run import OpenedRun
from telamon.parallel.rules import ACTIVATION_RULES
from telamon.train.evaluation import SUMS, add_up
from telamon.train.loss import language_model_loss
from telamon.train.placement import place
from telamon.train.step import bind_step, eval_step

_BATCH_TOKENS = 8192
"""Tokens of a batch where its rows are not given."""


@dataclass(frozen=True)
class Perplexity:
    """What a text costs a model."""

    loss: float
    """Nats a token."""
    perplexity: float
    """e to the loss."""
    bits_per_byte: float | None
    """Bits over bytes of UTF-8, which compares models of different tokenizers."""
    tokens: int
    """Scored, each once."""
    windows: int
    context: int
    """Tokens of a window."""
    stride: int
    """Tokens from one window to the next: all but the first score as many."""
    seconds: float
    """Compilation included."""


def read_text_file(file: Path) -> str:
    """A text file. Raises DataError where it cannot be read, is not UTF-8 or is empty."""
    try:
        text = file.read_bytes().decode("utf-8")
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text (byte {error.start:,}); convert it first") from error
    if not text:
        raise DataError(f"{file} is empty: there is nothing to predict")
    return text


def perplexity(
    opened: OpenedRun,
    text: str,
    *,
    context: int | None = None,
    stride: int | None = None,
    batch_size: int | None = None,
    end: bool = False,
    on_windows: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """The loss of a run's model on a text as one document.

    The text begins with BOS where training documents do; without one, its first token is given and not scored. It is cut into windows, and
    a token is predicted from those before it in its window.

    Args:
        opened: the run.
        text: not empty.
        context: tokens of a window; none: the run's row length.
        stride: tokens between the beginnings of two windows. Below `context`, windows overlap, and a token has at least `context - stride`
            tokens before it: slower, and a lower loss. None: `context`, which is how training's evaluation cuts its documents.
        batch_size: windows at a time; none: about 8,192 tokens' worth.
        end: score the token that ends a document too, as training's evaluation does.
        on_windows: called with the windows done and their number, as it goes on.

    Raises:
        ConfigError: sizes that are not possible, a run whose data were never text, or a tokenizer that knows more than the model.
        DataError: the text has no token to predict.
    """
    began = time.perf_counter()
    if not isinstance(opened.tokenizer, TextTokenizer):
        raise ConfigError(f"{opened.folder} was trained on ids that were never text; a text has no perplexity for it")
    context, stride = _sizes(opened, context, stride, batch_size)
    ids = _document(opened.tokenizer, text, end=end)
    if len(ids) < 2:
        raise DataError("the text is one token, and there is none before it that could predict it; give a longer text")
    check_known(int(ids.max()), rows=opened.model.spec.vocab_size)
    width = min(context, len(ids) - 1)
    stride = min(stride, width)
    windows = count_windows(len(ids), width=width, stride=stride)
    rows = _whole_rows(min(windows, batch_size or max(1, _BATCH_TOKENS // width)), opened.mesh)
    # Which kernel the run named was for the devices that trained it.
    loss = language_model_loss(opened.config.train.model_copy(update={"loss": "auto"}))
    step = jax.jit(bind_step(eval_step, model=opened.model, loss=loss))
    pending = []
    with jax.set_mesh(opened.mesh):
        for number, batch in enumerate(cut(ids, width=width, stride=stride, rows=rows), 1):
            counts = step(opened.weights, place(batch, token_bytes=opened.tokenizer.token_bytes, mesh=opened.mesh)).counts
            pending.append({name: float(np.asarray(counts[name])) for name in SUMS})
            if on_windows:
                on_windows(min(number * rows, windows), windows)
    found = add_up(pending)
    assert found is not None and found.tokens == len(ids) - 1
    return Perplexity(
        loss=found.loss,
        perplexity=math.exp(found.loss),
        bits_per_byte=found.bits_per_byte,
        tokens=found.tokens,
        windows=windows,
        context=width,
        stride=stride,
        seconds=time.perf_counter() - began,
    )


def count_windows(tokens: int, *, width: int, stride: int) -> int:
    """Windows of `width` tokens, `stride` apart, in which each token but the first is predicted."""
    return 1 + max(0, -(-(tokens - 1 - width) // stride))


def cut(ids: np.ndarray, *, width: int, stride: int, rows: int) -> Iterator[Batch]:
    """A document's windows as batches [rows, width], in order; the mask is 1 where a target is scored, which each token but the first is once.

    Args:
        ids: i32[tokens], at least two.
        width, stride: see `count_windows`; the stride is at most the width.
        rows: of a batch; the last one is filled up with empty rows.
    """
    windows = count_windows(len(ids), width=width, stride=stride)
    for first in range(0, windows, rows):
        begins = (np.arange(first, first + rows) * stride)[:, None]
        place = begins + np.arange(width)
        real = (place < len(ids) - 1) & (begins < windows * stride)
        scored = real & ((begins == 0) | (place >= begins - stride + width))
        at = np.where(real, place, 0)
        yield {
            "tokens": ids[at] * real,
            "targets": ids[at + 1] * scored,
            "mask": scored.astype(np.float32),
            "segments": real.astype(np.int32),
            "positions": np.arange(width, dtype=np.int32) * real,
        }


def _document(tokenizer: TextTokenizer, text: str, *, end: bool) -> np.ndarray:
    opening = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    closing = [tokenizer.eos_id] if end and tokenizer.eos_id is not None else []
    return np.array([*opening, *tokenizer.encode(text), *closing], np.int32)


def _sizes(opened: OpenedRun, context: int | None, stride: int | None, batch_size: int | None) -> tuple[int, int]:
    context = context or opened.config.train.seq_len
    limit = opened.config.model.position_limit
    if limit is not None and context > limit:
        raise ConfigError(f"a context of {context} tokens is not possible: {opened.folder} has {limit} positions; give at most {limit}")
    stride = stride or context
    if not 0 < stride <= context:
        raise ConfigError(f"a stride of {stride} tokens leaves out what lies between windows of {context}; give 1 to {context}")
    if batch_size is not None and batch_size < 1:
        raise ConfigError(f"a batch of {batch_size} windows is not possible; give 1 or more")
    return context, stride


def _whole_rows(rows: int, mesh: Mesh) -> int:
    """Rows that the devices of a mesh can share."""
    share = math.prod(mesh.shape[axis] for axis in ACTIVATION_RULES["batch"])
    return -(-rows // share) * share
