"""Tokenizers: a byte-level BPE trained on first use, any Hugging Face tokenizer by path, and bare ids for synthetic data."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from telamon.data.words import WordMemo, cuts_like_gpt2
from telamon.errors import ConfigError, DataError

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"

_KNOWN_EOS = (EOS, "<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[SEP]")
_KNOWN_BOS = (BOS, "<s>", "<|begin_of_text|>", "<bos>", "[CLS]")
_LONGEST_WORD = 256
"""Longest word, in bytes, that a BPE is trained on; longer ones are cut."""

_BYTE_TOKEN = "<0x{:02X}>"


class Tokenizer(Protocol):
    """Text to ids and back."""

    vocab_size: int
    """Ids are below it."""
    bos_id: int | None
    eos_id: int | None
    token_bytes: np.ndarray
    """i32[vocab_size]: bytes of text that each id stands for; 0 for special tokens."""
    hash: str
    """Equal for tokenizers that give the same ids."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without BOS or EOS."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of several texts, on all cores."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, special tokens left out."""
        ...

    def name(self, token: int) -> str:
        """How the vocabulary spells an id."""
        ...


class TextTokenizer:
    """A `tokenizers` tokenizer with the ids that begin and end a document.

    Text is only text: where it spells a special token, it is encoded by its letters, so that no document can end another one.
    """

    def __init__(self, inner: Any, *, bos: str | None, eos: str | None):
        inner.no_padding()
        inner.no_truncation()
        inner.encode_special_tokens = True
        self._inner = inner
        self.vocab_size = max(inner.get_vocab(with_added_tokens=True).values()) + 1
        self.bos_id: int | None = None if bos is None else inner.token_to_id(bos)
        self.eos_id: int | None = None if eos is None else inner.token_to_id(eos)
        self.token_bytes = _token_bytes(inner, self.vocab_size)
        self._memo = WordMemo(self.encode_batch) if _memo_is_faster(inner) else None
        self.hash = hashlib.sha256(f"{inner.to_str()}\0{self.bos_id}\0{self.eos_id}".encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without BOS or EOS."""
        return self._inner.encode(text, add_special_tokens=False).ids

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of several texts end to end, u32[ids], and how many each has, i64[texts]."""
        if self._memo is not None:
            return self._memo.encode_flat(texts)
        encoded = self.encode_batch(texts)
        counts = np.array([len(ids) for ids in encoded], np.int64)
        return np.fromiter(chain.from_iterable(encoded), np.uint32, counts.sum()), counts

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of several texts, on all cores."""
        return [e.ids for e in self._inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, special tokens left out."""
        return self._inner.decode([int(i) for i in ids], skip_special_tokens=True)

    def name(self, token: int) -> str:
        """How the vocabulary spells an id."""
        return self._inner.id_to_token(token) or f"<{token}>"

    def to_json(self) -> str:
        """Content of its tokenizer.json."""
        return self._inner.to_str()

    def save(self, path: Path) -> None:
        """Write a tokenizer.json."""
        path.write_text(self.to_json(), encoding="utf-8")

    def export(self, folder: Path) -> None:
        """Write a tokenizer.json, and beside it what begins and ends a document: a folder that `load_tokenizer` reads back."""
        folder.mkdir(parents=True, exist_ok=True)
        self.save(folder / "tokenizer.json")
        named = {"bos_token": self.bos_id, "eos_token": self.eos_id}
        specials = {name: None if i is None else self._inner.id_to_token(i) for name, i in named.items()}
        (folder / "tokenizer_config.json").write_text(json.dumps(specials, indent=2) + "\n", encoding="utf-8")


def _memo_is_faster(inner: Any) -> bool:
    """The library encodes texts on all cores at once, the memo on one, about six times as fast."""
    return (os.cpu_count() or 1) <= 6 and cuts_like_gpt2(json.loads(inner.to_str()))


class IdTokenizer:
    """For data that were never text: a "text" is ids in decimal, and no id stands for any bytes."""

    bos_id: int | None = None
    eos_id: int | None = None

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.token_bytes = np.zeros(vocab_size, np.int32)
        self.hash = f"ids-{vocab_size}"

    def encode(self, text: str) -> list[int]:
        """The ids that `text` names, such as "3 14 15"."""
        try:
            ids = [int(word) for word in text.split()]
        except ValueError:
            ids = [-1]
        if any(not 0 <= i < self.vocab_size for i in ids):
            raise DataError(f"{text!r}: synthetic data have no text; write ids from 0 to {self.vocab_size - 1}, with spaces between them")
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of several texts."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The ids in decimal."""
        return " ".join(str(int(i)) for i in ids)

    def name(self, token: int) -> str:
        """The id in decimal."""
        return str(token)


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> TextTokenizer:
    """A byte-level BPE (any text has ids, and they decode to it exactly) with `<|bos|>`, `<|eos|>`, `<|pad|>` as ids 0, 1, 2."""
    import tokenizers as hf

    bytes_in = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner = hf.Tokenizer(hf.models.BPE())
    # The trainer's time grows with the square of a word's length, and a line without spaces is one word.
    inner.pre_tokenizer = hf.pre_tokenizers.Sequence([bytes_in, hf.pre_tokenizers.FixedLength(_LONGEST_WORD)])
    inner.decoder = hf.decoders.ByteLevel()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[BOS, EOS, PAD], initial_alphabet=bytes_in.alphabet(), show_progress=False
    )
    inner.train_from_iterator(texts, trainer)
    inner.pre_tokenizer = bytes_in
    return TextTokenizer(inner, bos=BOS, eos=EOS)


def load_tokenizer(path: str) -> TextTokenizer:
    """A Hugging Face tokenizer from a tokenizer.json or a folder that holds one.

    BOS and EOS come from the tokenizer_config.json or special_tokens_map.json beside it, else from the special tokens' usual names. Documents
    begin with BOS unless `add_bos_token` is false there, or, without it, transformers would add none: such a model knows BOS from chats alone.
    Raises ConfigError where the file is missing, cannot be read, or names no EOS.
    """
    import tokenizers as hf

    given = Path(path)
    file = given / "tokenizer.json" if given.is_dir() else given
    if not file.is_file():
        raise ConfigError(f"data.tokenizer.path={path}: no tokenizer.json there; give the file, or the folder that holds it")
    try:
        inner = hf.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"data.tokenizer.path={file}: not a tokenizer file: {error}") from error
    settings = _settings(file.parent)
    declared = declared_specials(file.parent)
    special = {t.content for t in inner.get_added_tokens_decoder().values()}
    bos = declared["bos_token"] if "bos_token" in declared else next((t for t in _KNOWN_BOS if t in special), None)
    eos = declared["eos_token"] if declared.get("eos_token") else next((t for t in _KNOWN_EOS if t in special), None)
    for name, token in (("bos_token", bos), ("eos_token", eos)):
        if token is not None and inner.token_to_id(token) is None:
            raise ConfigError(f"data.tokenizer.path={file}: the {name} {token!r} is not in its vocabulary")
    if eos is None:
        raise ConfigError(
            f"data.tokenizer.path={file}: no token ends a document; name it as eos_token in a tokenizer_config.json beside the file "
            f"(special tokens there: {', '.join(map(repr, sorted(special))) or 'none'})"
        )
    return TextTokenizer(inner, bos=bos if _begins_with_bos(inner, settings, bos) else None, eos=eos)


def _begins_with_bos(inner: Any, settings: Mapping[str, Any], bos: str | None) -> bool:
    said = settings.get("add_bos_token")
    if isinstance(said, bool):
        return said
    if "tokenizer_class" not in settings:  # not written by transformers, whose tokenizers say it by what they add to a text
        return True
    plain = inner.encode("a", add_special_tokens=False).ids
    return bos is not None and inner.encode("a").ids[: len(plain) + 1] == [inner.token_to_id(bos), *plain]


def declared_specials(folder: Path) -> dict[str, str | None]:
    """What a tokenizer's folder says of bos_token, eos_token, pad_token and so on; a token that is null there is declared absent."""
    found: dict[str, str | None] = {}
    for key, token in _settings(folder).items():
        text = token.get("content") if isinstance(token, dict) else token
        if key.endswith("_token") and (text is None or isinstance(text, str)):
            found[key] = text
    return found


def _settings(folder: Path) -> dict[str, Any]:
    """The folder's special_tokens_map.json and tokenizer_config.json; the latter counts where they differ."""
    found: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        file = folder / name
        if file.is_file():
            try:
                found |= json.loads(file.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ConfigError(f"{file}: not valid JSON: {error}") from error
    return found


def _token_bytes(inner: Any, vocab_size: int) -> np.ndarray:
    """Bytes of text that each token stands for, from the spelling that its model uses."""
    sizes = np.zeros(vocab_size, np.int32)
    special = {i for i, token in inner.get_added_tokens_decoder().items() if token.special}
    added = set(inner.get_added_tokens_decoder())
    layout = json.loads(inner.to_str())
    byte_level = "ByteLevel" in json.dumps([layout["decoder"], layout["pre_tokenizer"]])
    single = {_BYTE_TOKEN.format(b) for b in range(256)}
    continued = (layout["model"].get("continuing_subword_prefix") or "") if layout["model"].get("type") == "WordPiece" else ""
    for token, index in inner.get_vocab(with_added_tokens=True).items():
        if index in special:
            continue
        if index in added:
            sizes[index] = len(token.encode())
        elif byte_level:
            sizes[index] = len(token)  # one printable character for each byte
        elif token in single:
            sizes[index] = 1
        else:
            sizes[index] = len(token.removeprefix(continued).replace("▁", " ").encode())
    return sizes
