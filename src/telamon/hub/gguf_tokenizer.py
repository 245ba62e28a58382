"""A Hugging Face tokenizer from the vocabulary in a GGUF file's metadata (format: ggml-org/ggml, docs/gguf.md, "Tokenizer")."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from telamon.errors import ConfigError, DataError
from telamon.hub.gguf_metadata import Metadata
from telamon.hub.gguf_words import WORDS

_PREFIX = "tokenizer.ggml."
_NORMAL, _CONTROL, _USER_DEFINED, _BYTE = 1, 3, 4, 6
_SPACE = "▁"
_ROLES = ("bos", "eos", "unknown", "padding", "eot", "eom")
_HARMLESS = (
    *("seperator_token_id", "mask_token_id", "cls_token_id", "prefix_token_id", "suffix_token_id", "middle_token_id"),
    *(f"fim_{part}_token_id" for part in ("pre", "suf", "mid", "pad", "rep", "sep")),
    "token_type_count",
)
"""Roles that training and generation have no use for."""


@dataclass(frozen=True)
class Vocabulary:
    """Tokens of a file in the order of their ids, what each is, and the ids that have a role."""

    tokens: list[str]
    kinds: list[int]
    roles: dict[str, int]

    def of_role(self, role: str) -> str | None:
        """How the token of a role is spelt, None where none has it."""
        return self.tokens[self.roles[role]] if role in self.roles else None


def write_tokenizer(meta: Metadata, folder: Path) -> dict[str, Path]:
    """Write the tokenizer and what goes with it into `folder`, and say which files there are, by name. No files where there is no tokenizer.

    Raises:
        ConfigError: a kind of tokenizer, or a rule that cuts text into words, which is not known here.
        DataError: a vocabulary that is not consistent.
    """
    model = meta.get(f"{_PREFIX}model", str, "none")
    if model in ("none", "no_vocab"):
        return {}
    if model not in _BUILDERS:
        raise ConfigError(f"{meta.path}: the metadata {_PREFIX}model is {model!r}; tokenizers that can be read: {', '.join(_BUILDERS)}")
    vocabulary = _vocabulary(meta)
    inner, begins = _BUILDERS[model](meta, vocabulary)
    add_bos, add_eos = meta.get(f"{_PREFIX}add_bos_token", bool, begins), meta.get(f"{_PREFIX}add_eos_token", bool, False)
    _add_tokens(inner, vocabulary)
    _frame(meta, inner, vocabulary, add_bos, add_eos)
    meta.expect(f"{_PREFIX}add_sep_token", False, "no separator is put between texts")
    meta.refuse_unused(_PREFIX, _HARMLESS)
    texts = {
        "tokenizer.json": inner.to_str(),
        "tokenizer_config.json": _as_json(_tokenizer_config(meta, vocabulary, add_bos, add_eos)),
        "generation_config.json": _as_json(_generation_config(vocabulary)),
        "chat_template.jinja": meta.get("tokenizer.chat_template", str, ""),
    }
    for name, text in texts.items():
        if text:
            (folder / name).write_text(text, encoding="utf-8")
    return {name: folder / name for name, text in texts.items() if text}


def _vocabulary(meta: Metadata) -> Vocabulary:
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(meta.need(f"{_PREFIX}tokens", list))]
    kinds = meta.get(f"{_PREFIX}token_type", list, [_NORMAL] * len(tokens))
    if len(kinds) != len(tokens):
        raise DataError(f"{meta.path}: {_PREFIX}token_type has {len(kinds)} entries for {len(tokens)} tokens")
    if len(set(tokens)) != len(tokens):
        seen: set[str] = set()
        double = next(token for token in tokens if token in seen or seen.add(token))
        raise DataError(f"{meta.path}: {_PREFIX}tokens has {double!r} twice, so that an id would never be met")
    roles = {role: meta.get(f"{_PREFIX}{role}_token_id", int, None) for role in _ROLES}
    for role, token in roles.items():
        if token is not None and not 0 <= token < len(tokens):
            raise DataError(f"{meta.path}: {_PREFIX}{role}_token_id is {token}, and there are {len(tokens)} tokens")
    return Vocabulary(tokens, kinds, {role: token for role, token in roles.items() if token is not None})


def _byte_level(meta: Metadata, vocabulary: Vocabulary) -> tuple[Any, bool]:
    """GPT-2's kind: bytes as printable characters, a rule that cuts text into words, and merges in the order of their rank."""
    import tokenizers as hf

    rule = meta.get(f"{_PREFIX}pre", str, None)
    if rule not in WORDS:
        raise ConfigError(
            f"{meta.path}: the metadata {_PREFIX}pre, the rule that cuts text into words, is {'missing' if rule is None else repr(rule)}; "
            f"rules that are known: {', '.join(WORDS)}"
        )
    words = WORDS[rule]
    meta.expect(f"{_PREFIX}add_space_prefix", False, "a byte-level tokenizer puts no space before a text")
    meta.get(f"{_PREFIX}scores", list, None)  # written by some converters, for a kind of tokenizer that this is not
    merges = [tuple(merge.split(" ")) for merge in meta.need(f"{_PREFIX}merges", list)]
    inner = _bpe(meta, vocabulary, merges, ignore_merges=words.whole_words)
    inner.normalizer = hf.normalizers.NFC() if words.composed else None
    splits = [hf.pre_tokenizers.Split(hf.Regex(pattern), "isolated") for pattern in words.patterns]
    inner.pre_tokenizer = hf.pre_tokenizers.Sequence([*splits, hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    inner.decoder = hf.decoders.ByteLevel()
    return inner, words.begins


def _sentencepiece(meta: Metadata, vocabulary: Vocabulary) -> tuple[Any, bool]:
    """Llama 2's and Gemma's kind: a mark for spaces, scores instead of merges, bytes for what is in no token."""
    import tokenizers as hf

    if (rule := meta.get(f"{_PREFIX}pre", str, "default")) != "default":
        raise ConfigError(
            f"{meta.path}: the metadata {_PREFIX}pre is {rule!r}, and a tokenizer of SentencePiece's kind cuts no text into words"
        )
    meta.expect(f"{_PREFIX}remove_extra_whitespaces", False, "spaces are kept as they are")
    meta.get(f"{_PREFIX}merges", list, None)  # follow from the scores
    merges = _merges_of_scores(meta, vocabulary)
    bytes_there = sum(re.fullmatch(r"<0x[0-9A-F]{2}>", token) is not None for token in vocabulary.tokens) == 256
    inner = _bpe(meta, vocabulary, merges, unk_token=vocabulary.of_role("unknown"), fuse_unk=True, byte_fallback=bytes_there)
    prefix = meta.get(f"{_PREFIX}add_space_prefix", bool, True)
    mark = hf.normalizers.Replace(" ", _SPACE)
    inner.normalizer = hf.normalizers.Sequence([hf.normalizers.Prepend(_SPACE), mark]) if prefix else mark
    steps = [hf.decoders.Replace(_SPACE, " "), hf.decoders.ByteFallback(), hf.decoders.Fuse()]
    inner.decoder = hf.decoders.Sequence([*steps, hf.decoders.Strip(" ", 1, 0)] if prefix else steps)
    return inner, True


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}
"""By `tokenizer.ggml.model`. Each gives the tokenizer, and whether texts begin with BOS where the file does not say (as in llama.cpp)."""


def _bpe(meta: Metadata, vocabulary: Vocabulary, merges: Sequence[tuple[str, ...]], **options: Any) -> Any:
    import tokenizers as hf

    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    try:
        return hf.Tokenizer(hf.models.BPE(vocab=ids, merges=merges, **options))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{meta.path}: {_PREFIX}merges does not fit {_PREFIX}tokens: {error}") from error


def _merges_of_scores(meta: Metadata, vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Pairs of tokens that make a third, in the order in which SentencePiece would join them: by the score of what they make."""
    scores = meta.need(f"{_PREFIX}scores", list)
    if len(scores) != len(vocabulary.tokens):
        raise DataError(f"{meta.path}: {_PREFIX}scores has {len(scores)} entries for {len(vocabulary.tokens)} tokens")
    score = {token: s for token, s, kind in zip(vocabulary.tokens, scores, vocabulary.kinds, strict=True) if kind == _NORMAL}
    pairs = [
        (made, token[:cut], token[cut:])
        for token, made in score.items()
        for cut in range(1, len(token))
        if token[:cut] in score and token[cut:] in score
    ]
    pairs.sort(key=lambda pair: -pair[0])
    return [(left, right) for _, left, right in pairs]


def _add_tokens(inner: Any, vocabulary: Vocabulary) -> None:
    """Tokens that are found in a text before it is cut into words: control tokens, and those that a model's makers added."""
    import tokenizers as hf

    control = {vocabulary.roles[role] for role in ("bos", "eos", "eot", "eom", "unknown") if role in vocabulary.roles}
    control |= {i for i, kind in enumerate(vocabulary.kinds) if kind == _CONTROL}
    added = sorted(control | {i for i, kind in enumerate(vocabulary.kinds) if kind == _USER_DEFINED})
    inner.add_tokens([hf.AddedToken(vocabulary.tokens[i], special=i in control, normalized=False) for i in added])


def _frame(meta: Metadata, inner: Any, vocabulary: Vocabulary, add_bos: bool, add_eos: bool) -> None:
    """Have BOS and EOS put around a text where the file asks for it."""
    import tokenizers as hf

    asked = [role for role, wanted in (("bos", add_bos), ("eos", add_eos)) if wanted]
    for role in asked:
        if role not in vocabulary.roles:
            raise DataError(f"{meta.path}: {_PREFIX}add_{role}_token is true, and there is no {_PREFIX}{role}_token_id")
    if asked:
        spelt = {role: vocabulary.tokens[vocabulary.roles[role]] for role in asked}
        before, after = ([spelt[role]] if role in spelt else [] for role in ("bos", "eos"))
        inner.post_processor = hf.processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *(f"{token}:1" for token in before), "$B:1", *(f"{token}:1" for token in after)],
            special_tokens=[(spelt[role], vocabulary.roles[role]) for role in asked],
        )


def _tokenizer_config(meta: Metadata, vocabulary: Vocabulary, add_bos: bool, add_eos: bool) -> dict[str, Any]:
    arch = meta.need("general.architecture", str)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": meta.need(f"{arch}.context_length", int),
        "clean_up_tokenization_spaces": False,
        "bos_token": vocabulary.of_role("bos"),
        "eos_token": vocabulary.of_role("eos"),
        "unk_token": vocabulary.of_role("unknown"),
        "pad_token": vocabulary.of_role("padding"),
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
    }


def _generation_config(vocabulary: Vocabulary) -> dict[str, Any]:
    """Ids with a role in generation; a turn's end ends it as well as a document's."""
    roles = vocabulary.roles
    ends = list(dict.fromkeys(roles[role] for role in ("eos", "eot", "eom") if role in roles))
    config = {
        "bos_token_id": roles.get("bos"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": roles.get("padding"),
    }
    return {name: value for name, value in config.items() if value is not None}


def _as_json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
