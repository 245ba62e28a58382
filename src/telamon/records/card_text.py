"""A model's card as text for a terminal."""

from collections.abc import Iterator

from telamon.config.load import plain
from telamon.config.yamlio import dump
from telamon.records.card import SERVED_LENGTH, TRAINING_BYTES, Card, Checked
from telamon.records.record import Record


def render(card: Card) -> str:
    """The card: rows of a label and what belongs to it, then the sizes as YAML, as a run's `model` section has them."""
    rows = {
        "parameters": _parameters(card),
        "layers": [card.layers],
        "experts": [card.experts] if card.experts else [],
        "FLOPs a token": _flops(card),
        "training": _training(card),
        "serving": _serving(card),
        "checks": _checks(card),
    }
    width = max(map(len, rows)) + 2
    lines = [" · ".join(part for part in (card.name, card.repository, card.architecture) if part), card.about, ""]
    for label, texts in rows.items():
        lines += [f"{label if index == 0 else '':<{width}}{text}" for index, text in enumerate(texts)]
    return "\n".join([*lines, "", dump({"model": plain(card.config)})])


def _parameters(card: Card) -> Iterator[str]:
    counts = card.parameters
    yield f"{counts.total:,}"
    if counts.active is not None:
        yield f"{counts.active:,} of them active: all but those of experts that a token does not go to"
    head = f"{counts.head:,} of the output head" if counts.head else "which is the output head too"
    yield f"{counts.embedding:,} of the table of tokens, {head}"
    if counts.positions:
        yield f"{counts.positions:,} of the table of positions"
    yield f"{' or '.join(f'{count:,}' for count in counts.per_layer)} a layer"
    yield f"{counts.matmul:,} that each token is multiplied with"


def _flops(card: Card) -> Iterator[str]:
    for length, flops in card.flops.items():
        yield f"{in_thousands(flops)} forward and backward, {in_thousands(flops / 3)} forward alone, in rows of {length:,} tokens"
    yield "6 for each parameter of matrix products, and causal attention within its window or chunk"


def _training(card: Card) -> Iterator[str]:
    yield (
        f"{binary_size(card.memory.training)} over all devices: weights, gradients and AdamW's moments in float32, {TRAINING_BYTES} bytes a parameter"
    )
    yield "activations come on top; they depend on train.batch_size, train.seq_len and train.remat"


def _serving(card: Card) -> Iterator[str]:
    memory = card.memory
    yield f"{binary_size(memory.weights)} of weights in bfloat16"
    beyond = (
        f", {memory.cache_per_token_beyond:,} once the windows are full" if memory.cache_per_token_beyond < memory.cache_per_token else ""
    )
    yield f"{memory.cache_per_token:,} bytes of keys and values a token{beyond}"
    kept = (
        ""
        if memory.cache_kept == memory.cache_served
        else f" where windows bound them; this version keeps {binary_size(memory.cache_kept)}"
    )
    yield f"{binary_size(memory.cache_served)} of them for {SERVED_LENGTH:,} tokens{kept}"


def _checks(card: Card) -> Iterator[str]:
    yield from map(_check, card.checks)
    if not card.records.is_dir():
        yield f"no folder {card.records} is here: records of checks are in a checkout of Telamon"


def _check(check: Checked) -> str:
    found = []
    if check.whole is not None:
        found.append(_outcome(check.whole))
    if check.tiny is not None:
        found.append(f"{_outcome(check.tiny)} at shrunk sizes")
    if check.whole is None:
        found.append("the whole model was not checked" if check.tiny is not None else "not checked")
    return f"{check.title}: {'; '.join(found)}"


def _outcome(record: Record) -> str:
    return f"{'passed' if record.passed else 'FAILED'} ({record.figure:.3g}, at most {record.threshold:g}, {record.date})"


def binary_size(count: int) -> str:
    """Bytes for people, such as ``15.26 GiB``."""
    power = min(max(count.bit_length() - 1, 0) // 10, len(_BYTES) - 1)
    return f"{count / 1024**power:,.4g} {_BYTES[power]}"


def in_thousands(count: float) -> str:
    """A large number for people, such as ``49.03 G``."""
    power = min(max(len(str(int(count))) - 1, 0) // 3, len(_THOUSANDS) - 1)
    return f"{count / 1000**power:.4g} {_THOUSANDS[power]}".rstrip()


_BYTES = ("bytes", "KiB", "MiB", "GiB", "TiB")
_THOUSANDS = ("", "k", "M", "G", "T", "P")
