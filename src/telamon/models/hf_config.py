"""Hugging Face's config.json: every attribute is used, harmless for a reason, or refused by name."""

import math
from collections.abc import Mapping
from copy import copy
from difflib import get_close_matches
from typing import Any, Self

from telamon.errors import ConfigError

HARMLESS = {
    "architectures": "checked apart",
    "model_type": "chooses the family",
    "torch_dtype": "each tensor says its own type",
    "dtype": "each tensor says its own type",
    "transformers_version": "a record",
    "_name_or_path": "a record",
    "use_cache": "generation always keeps a cache",
    "cache_implementation": "generation chooses its own",
    "initializer_range": "of use to new weights alone",
    "attention_dropout": "there is no dropout",
    "bos_token_id": "carried along for exports",
    "eos_token_id": "carried along for exports",
    "pad_token_id": "carried along for exports",
    "output_attentions": "of use to transformers alone",
    "output_hidden_states": "of use to transformers alone",
    "return_dict": "of use to transformers alone",
    "chunk_size_feed_forward": "of use to transformers alone",
    "problem_type": "of use to classifiers alone",
    "id2label": "of use to classifiers alone",
    "label2id": "of use to classifiers alone",
    "_attn_implementation_autoset": "of use to transformers alone",
    "attn_implementation": "of use to transformers alone",
    "transformers.js_config": "of use to a browser alone",
    "unsloth_version": "a record",
    "unsloth_fixed": "a record",
    "name_or_path": "a record",
    "_commit_hash": "a record",
    "_num_labels": "of use to classifiers alone",
    "num_labels": "of use to classifiers alone",
    "finetuning_task": "of use to classifiers alone",
    "tokenizer_class": "the tokenizer's own files say it",
    "prefix": "of use to pipelines alone",
    "task_specific_params": "of use to pipelines alone",
    "output_past": "generation always keeps a cache",
    "gradient_checkpointing": "training chooses its own",
    "torchscript": "of use to transformers alone",
    "pruned_heads": "weights are as they are stored",
    "use_bfloat16": "of use to TensorFlow alone",
    "tf_legacy_loss": "of use to TensorFlow alone",
    "tie_encoder_decoder": "there is no encoder",
    "is_decoder": "of use to models that can be encoders as well",
    "decoder_start_token_id": "there is no encoder",
    "cross_attention_hidden_size": "there is no encoder",
    "sep_token_id": "carried along in the tokenizer's files",
    "_attn_implementation": "of use to transformers alone",
    "_flash_attn_2_enabled": "of use to transformers alone",
}
"""Attributes that change no number of the forward pass, and why."""

GENERATION = (
    *("bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size"),
    *("encoder_repetition_penalty", "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty", "forced_bos_token_id"),
    *("forced_eos_token_id", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams"),
    *("num_return_sequences", "output_scores", "remove_invalid_values", "repetition_penalty", "return_dict_in_generate"),
    *("suppress_tokens", "temperature", "top_k", "top_p", "typical_p"),
)
"""How tokens are drawn, which files from before generation_config.json say beside the model; transformers drops them here as well."""

_NO_DEFAULT = object()


class Values:
    """A dictionary whose entries are ticked off as they are read.

    Args:
        raw: the entries.
        where: names the dictionary in messages, such as "config.json: rope_scaling".
        defaults: for entries that are not there.
    """

    def __init__(self, raw: Mapping[str, Any], *, where: str, defaults: Mapping[str, Any] | None = None):
        self._raw, self._where, self._defaults = dict(raw), where, dict(defaults or {})
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._raw

    def get(self, name: str, default: Any = _NO_DEFAULT) -> Any:
        """An entry, which may be None where the file says null; the default is for one that is not there."""
        self._read.add(name)
        fallback = self._defaults.get(name) if default is _NO_DEFAULT else default
        return self._raw.get(name, fallback)

    def size(self, name: str, default: Any = _NO_DEFAULT) -> Any:
        """A positive integer. With a default, the file need not state it: the default is for null too."""
        value = self.get(name) if default is _NO_DEFAULT else self.get(name, default)
        if value is None and default is not _NO_DEFAULT:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refuse(name, value, "a positive whole number is needed") if name in self._raw else self._lacking(name)
        return value

    def count(self, name: str, default: Any = _NO_DEFAULT) -> Any:
        """A whole number from 0 on; for the default see `size`."""
        return 0 if self.get(name, default) == 0 else self.size(name, default)

    def flag(self, name: str, default: bool) -> bool:
        """Whether something is so; null says no, and some files say it with a whole number."""
        value = self.get(name, default)
        if not isinstance(value, int | None):
            raise self.refuse(name, value, "true or false is needed")
        return bool(value)

    def number(self, name: str, default: Any = _NO_DEFAULT) -> Any:
        """A finite number, as a float; for the default see `size`."""
        value = self.get(name) if default is _NO_DEFAULT else self.get(name, default)
        if value is None and default is not _NO_DEFAULT:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self.refuse(name, value, "a number is needed") if name in self._raw else self._lacking(name)
        return float(value)

    def dictionary(self, name: str) -> Mapping[str, Any]:
        """A dictionary, empty where the file has none."""
        value = self.get(name, None)
        if value is not None and not isinstance(value, Mapping):
            raise self.refuse(name, value, "a dictionary is needed")
        return value or {}

    def listed(self, name: str) -> list[Any] | None:
        """A list; None where the file has none."""
        value = self.get(name, None)
        if value is not None and not isinstance(value, list):
            raise self.refuse(name, value, "a list is needed")
        return value

    def must_be(self, name: str, *allowed: Any, because: str) -> None:
        """Refuse another value than these; null and absence are taken for them."""
        value = self.get(name)
        if value is not None and value not in allowed:
            raise self.refuse(name, value, f"{because}: {' or '.join(map(repr, allowed))}")

    def harmless(self, *names: str) -> None:
        """Tick off entries that change no number."""
        self._read.update(names)

    def without(self, *names: str) -> Self:
        """The same entries but these; what is read there is ticked off here too."""
        fewer = copy(self)
        fewer._raw = {name: value for name, value in self._raw.items() if name not in names}
        return fewer

    def inner(self, name: str, raw: Mapping[str, Any]) -> "Values":
        """A dictionary within this one."""
        return Values(raw, where=f"{self._where}: {name}")

    def refuse(self, name: str, value: Any, reason: str) -> ConfigError:
        """The error to raise for an entry."""
        return ConfigError(f"{self._where}: {name}={value!r} cannot be read; {reason}")

    def _lacking(self, name: str) -> ConfigError:
        near = get_close_matches(name, self._raw, 1)
        return ConfigError(f"{self._where} lacks {name}" + (f"; it has {near[0]}" if near else ""))

    def finish(self) -> None:
        """Refuse by name what nobody read."""
        unread = sorted(name for name in self._raw if name not in self._read)
        if unread:
            shown = ", ".join(f"{name}={self._raw[name]!r}"[:80] for name in unread[:5])
            more = f" and {len(unread) - 5} more" if len(unread) > 5 else ""
            raise ConfigError(
                f"{self._where}: not known here: {shown}{more}; it may change what the model computes, so the model is not built. "
                "Remove it if it does not"
            )


class HfAttributes(Values):
    """The attributes of a config.json."""

    def __init__(self, raw: Mapping[str, Any], *, source: str, defaults: Mapping[str, Any] | None = None):
        super().__init__(raw, where=source, defaults=defaults)
        self.harmless(*HARMLESS, *GENERATION)
