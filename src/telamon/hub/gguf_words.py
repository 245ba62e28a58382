"""How byte-level tokenizers cut a text into words before any merge, by the name that GGUF has for the rule (`tokenizer.ggml.pre`).

The rules are the models' own, as in their tokenizer.json; `default` is llama.cpp's, for files whose converter did not know the rule.
"""

from dataclasses import dataclass

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Words:
    """A rule: patterns that cut one after the other, each what the former ones left."""

    patterns: tuple[str, ...]
    composed: bool = False
    """Text is brought into Unicode's composed form (NFC) first."""
    whole_words: bool = False
    """A word that is a token is that token, whatever its merges would make of it."""
    begins: bool = False
    """Texts begin with BOS."""


_LLAMA3 = Words((_CL100K.replace("{DIGITS}", "{1,3}"),), whole_words=True, begins=True)
_QWEN2 = Words((_CL100K.replace("{DIGITS}", ""),), composed=True)
_GPT2_WORDS = Words((_GPT2,))
_DIGIT_BY_DIGIT = Words((r"\p{N}", _GPT2))

WORDS = {
    "gpt-2": _GPT2_WORDS,
    "default": Words((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "smollm": _DIGIT_BY_DIGIT,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
}
