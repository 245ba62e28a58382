"""Settings that would have no effect beside another one: whoever writes such a setting is told, instead of being ignored.

A run file may hold settings of a kind that an override then switches away from (`optimizer.kind=adamw` over a file written for
Muon); so only a setting that comes from the same source as what makes it idle, or from a later one, is refused.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from telamon.errors import ConfigError

if TYPE_CHECKING:
    from telamon.config.load import Loaded


@dataclass(frozen=True)
class Rule:
    """`keys` have an effect only where the value of `needs` passes `test`; `wanted` says so in words."""

    keys: tuple[str, ...]
    needs: str
    test: Callable[[Any], bool]
    wanted: str


RULES = (
    Rule(("data.sources.*.documents", "data.sources.*.length"), "data.sources.*.kind", lambda kind: kind == "synthetic", "synthetic"),
    Rule(("data.sources.*.field",), "data.sources.*.kind", lambda kind: kind in ("jsonl", "parquet"), "jsonl or parquet"),
    Rule(("data.tokenizer.vocab_size",), "data.tokenizer.path", lambda path: path is None, "none"),
    Rule(("optimizer.momentum",), "optimizer.kind", lambda kind: kind == "muon", "muon"),
    Rule(("optimizer.schedule.decay_fraction",), "optimizer.schedule.kind", lambda kind: kind == "wsd", "wsd"),
    Rule(("optimizer.schedule.final_fraction",), "optimizer.schedule.kind", lambda kind: kind != "constant", "cosine or wsd"),
    Rule(("optimizer.schedule.warmup_fraction",), "optimizer.schedule.warmup_steps", lambda steps: steps is None, "none"),
    Rule(("train.experts.capacity_factor",), "train.experts.path", lambda path: path == "capacity", "capacity"),
    Rule(("train.experts.balance_weight",), "train.experts.balance", lambda balance: balance != "none", "batch or sequence"),
    Rule(("eval.every", "eval.batch_size", "eval.batches"), "data.val_fraction", lambda share: share > 0, "more than 0"),
    Rule(("sample.prompts", "sample.temperature"), "sample.tokens", lambda tokens: tokens > 0, "more than 0"),
    Rule(("train.mtp_weight",), "model.mtp_layers", lambda layers: layers is not None and layers > 0, "1 or more"),
)


def refuse_idle(loaded: "Loaded", written: Sequence[Callable[[str], bool]]) -> None:
    """Raise ConfigError for a setting that was written down and has no effect.

    `written` holds a test for each source, oldest first, whether it sets a key.
    """
    for rule in RULES:
        for index in range(len(loaded.config.data.sources)) if "*" in rule.needs else (0,):
            needs = rule.needs.replace("*", str(index))
            family, _, field = needs.rpartition(".")
            lacking = family == "model" and field not in type(loaded.config.model).model_fields  # a size that another family has
            value = None if lacking else loaded.value(needs)
            if rule.test(value):
                continue
            for key in (key.replace("*", str(index)) for key in rule.keys):
                if _newest(written, key) >= max(_newest(written, needs), 0):
                    given = f"{key}={loaded.value(key)} has no effect with"
                    if lacking:
                        raise ConfigError(f"{given} model.family={loaded.config.model.family}, which has no {field}; leave it out")
                    shown = "none" if value is None else value
                    raise ConfigError(f"{given} {needs}={shown}; leave it out, or set {needs} to {rule.wanted}")


def _newest(written: Sequence[Callable[[str], bool]], key: str) -> int:
    return max((place for place, sets in enumerate(written) if sets(key)), default=-1)
