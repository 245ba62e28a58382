"""Which checkpoints stay."""

from collections.abc import Iterable


def expired(steps: Iterable[int], *, keep: int, keep_every: int | None) -> list[int]:
    """Steps that may go, oldest first: all but the newest `keep` and the multiples of `keep_every`."""
    assert keep >= 1, keep
    ordered = sorted(steps)
    newest = ordered[-keep:]
    return [step for step in ordered if step not in newest and not (keep_every and step % keep_every == 0)]
