"""The corpus of a run: its sources, their split into training and held-out documents, the tokenizer, and the tokens."""

import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from telamon.config.schema import RunConfig, SourceConfig
from telamon.data.cache import TokenStore, cached, token_store
from telamon.data.order import U64, key_of, mix
from telamon.data.packing import Documents, trainable
from telamon.data.sources import Inventory, Source, open_source
from telamon.data.tokenizer import BOS, EOS, IdTokenizer, TextTokenizer, Tokenizer, load_tokenizer, train_bpe
from telamon.errors import ConfigError, DataError

BPE_SAMPLE = 8_000_000
"""Characters of the training split that the byte-level BPE is trained on. On the standard library, training on all of it (32 MB) takes
4.5 times as long and gives 0.4 % fewer tokens; 4 MB give 1.3 % more."""


@dataclass(frozen=True)
class Part:
    """One source's documents as tokens, split; both sets leave out documents with nothing to train."""

    inventory: Inventory
    store: TokenStore
    training: Documents
    held_out: Documents
    dropped: int
    """Documents without text, or so short that they have no target."""


@dataclass(frozen=True)
class Corpus:
    """All sources, tokenised."""

    parts: tuple[Part, ...]
    tokenizer: Tokenizer
    sources: tuple[Source | None, ...]
    held_out: tuple[np.ndarray, ...]
    """Masks of the held-out documents, bool[documents] for each source."""

    @property
    def held_out_bytes(self) -> int:
        """Bytes of held-out text, in UTF-8."""
        # A synthetic document has -1 bytes, which says that it was never text; 0 would say that it is empty.
        return int(sum(part.store.bytes[mask].clip(min=0).sum() for part, mask in zip(self.parts, self.held_out, strict=True)))

    def held_out_texts(self) -> Iterator[bytes]:
        """The held-out text in UTF-8, one document after the other, in pieces; b"" ends each document."""
        for source, mask in zip(self.sources, self.held_out, strict=True):
            previous = None
            for document, piece in source.read(mask) if source is not None else ():
                if previous is not None and document != previous:
                    yield b""
                previous = document
                yield piece.encode()
            if previous is not None:
                yield b""

    @cached_property
    def gzip_bits_per_byte(self) -> float | None:
        """Bits that `gzip -9` spends on a byte of the held-out text: all documents in one stream or each on its own, whichever is less."""
        together, alone = _gzip(), _gzip()
        size = separate = joined = 0
        for piece in self.held_out_texts():
            size += len(piece)
            joined += len(together.compress(piece))
            separate += len(alone.compress(piece))
            if not piece:
                separate += len(alone.flush())
                alone = _gzip()
        joined += len(together.flush())
        return 8 * min(joined, separate) / size if size else None


def _gzip():
    return zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS)


def open_corpus(cfg: RunConfig) -> Corpus:
    """Read, split and tokenise the sources of a run. Slow on first use only: tokenizer and tokens are cached under `data.cache_dir`.

    Raises DataError for data that are missing or bad, and ConfigError for a tokenizer that is, or that does not fit the model.
    """
    data = cfg.data
    sources = tuple(None if s.kind == "synthetic" else open_source(s) for s in data.sources)
    inventories = tuple(
        _synthetic_inventory(config, cfg) if source is None else source.inventory
        for config, source in zip(data.sources, sources, strict=True)
    )
    for inventory in inventories:
        if not len(inventory.keys):
            raise DataError(f"{inventory.name}: no document in its {inventory.files} file(s)")
    held_out = split([inventory.keys for inventory in inventories], data.val_fraction)
    texts = [(source, mask) for source, mask in zip(sources, held_out, strict=True) if source is not None]
    tokenizer = _tokenizer(cfg, texts)
    if tokenizer.vocab_size > cfg.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={cfg.model.vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size}; "
            f"set model.vocab_size={tokenizer.vocab_size} or more"
        )
    parts = []
    for config, source, inventory, mask in zip(data.sources, sources, inventories, held_out, strict=True):
        if source is None:
            store = _synthetic_store(config, cfg)
        else:
            assert isinstance(tokenizer, TextTokenizer)
            store = token_store(source, tokenizer, data.cache_dir)
        parts.append(_part(inventory, store, mask))
    return Corpus(tuple(parts), tokenizer, sources, held_out)


def split(keys: list[np.ndarray], fraction: float) -> tuple[np.ndarray, ...]:
    """Which documents are held out, bool[documents] for each source: those whose hash falls into the lowest `fraction` of its range.

    Where that is none, and there are at least two documents, it is the one with the smallest hash.
    """
    masks = tuple(k.astype(np.float64) < fraction * 2.0**64 for k in keys)
    if fraction > 0 and not any(m.any() for m in masks) and sum(map(len, keys)) >= 2:
        source = min((i for i, k in enumerate(keys) if len(k)), key=lambda i: int(keys[i].min()))
        masks[source][np.argmin(keys[source])] = True
    return masks


def _part(inventory: Inventory, store: TokenStore, held_out: np.ndarray) -> Part:
    useful = trainable(store.length) & (store.bytes != 0)
    dropped = int(np.sum(~useful))
    training, validation = useful & ~held_out, useful & held_out
    if not training.any():
        raise DataError(
            f"{inventory.name}: nothing to train: of {len(useful)} document(s), {dropped} were dropped because they have no token to predict "
            f"(no text, or fewer than two tokens), and {int(validation.sum())} are held out (data.val_fraction)"
        )
    first, length = store.first[:-1], store.length
    return Part(inventory, store, Documents(first[training], length[training]), Documents(first[validation], length[validation]), dropped)


def _tokenizer(cfg: RunConfig, texts: list[tuple[Source, np.ndarray]]) -> Tokenizer:
    """The tokenizer that the config names; without a path, one trained on the training documents, kept in the cache."""
    import tokenizers as hf

    if cfg.data.tokenizer.path:
        return load_tokenizer(cfg.data.tokenizer.path)
    if not texts:
        return IdTokenizer(cfg.model.vocab_size)
    vocab = cfg.data.tokenizer.vocab_size
    hashes = [(s.inventory.sha256, s.inventory.reading) for s, _ in texts]
    facts = json.dumps([hashes, cfg.data.val_fraction, vocab, BPE_SAMPLE, hf.__version__])
    place = Path(cfg.data.cache_dir) / "tokenizers" / f"{hashlib.sha256(facts.encode()).hexdigest()[:32]}.json"

    def read(path: Path) -> TextTokenizer | None:
        return TextTokenizer(hf.Tokenizer.from_file(str(path)), bos=BOS, eos=EOS) if path.is_file() else None

    return cached(place, lambda half: train_bpe(bpe_sample(texts), vocab_size=vocab).save(half), read)


def bpe_sample(texts: list[tuple[Source, np.ndarray]], *, budget: int = BPE_SAMPLE) -> Iterator[str]:
    """About `budget` characters of the documents outside the masks: documents in the order of a hash, of each at most a sixteenth of it."""
    most = budget // 16
    keys = [mix(source.inventory.keys) for source, _ in texts]
    order = np.argsort(np.concatenate([np.where(mask, ~U64(0), key) for (_, mask), key in zip(texts, keys, strict=True)]), kind="stable")
    sizes = np.minimum(np.concatenate([source.inventory.sizes for source, _ in texts]), most)
    taken = np.zeros(len(order), bool)
    taken[order[np.cumsum(sizes[order]) - sizes[order] < budget]] = True
    taken &= ~np.concatenate([mask for _, mask in texts])
    borders = np.cumsum([len(mask) for _, mask in texts])[:-1]
    for (source, _), chosen in zip(texts, np.split(taken, borders), strict=True):
        current, left = -1, 0
        for document, piece in source.read(chosen):
            left = most if document != current else left
            current = document
            if left:
                yield piece[:left]
                left = max(0, left - len(piece))


def _synthetic_inventory(config: SourceConfig, cfg: RunConfig) -> Inventory:
    keys = mix(np.arange(config.documents, dtype=U64))
    facts = f"synthetic {config.documents} {config.length} {cfg.train.seed} {cfg.model.vocab_size}"
    return Inventory("synthetic", 0, 0, hashlib.sha256(facts.encode()).hexdigest(), "synthetic", keys, np.zeros(len(keys), np.int64))


def _synthetic_store(config: SourceConfig, cfg: RunConfig) -> TokenStore:
    """Seeded random tokens, in documents of length/2 to 3·length/2."""
    seed = key_of(cfg.train.seed, config.documents, config.length)
    low = max(2, config.length // 2)
    spread = U64(2 * (config.length - low) + 1) if config.length > low else U64(1)
    length = low + (mix(np.arange(config.documents, dtype=U64) ^ seed) % spread).astype(np.int64)
    first = np.concatenate([[0], np.cumsum(length)])
    tokens = mix(np.arange(first[-1], dtype=U64) ^ mix(seed)) % U64(cfg.model.vocab_size)
    return TokenStore(tokens.astype(np.uint32), first, np.full(config.documents, -1))
