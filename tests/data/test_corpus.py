import gzip
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from telamon.config.schema import SourceConfig
from telamon.data.corpus import bpe_sample, open_corpus, split
from telamon.data.sources import open_source
from telamon.errors import ConfigError, DataError


def keys(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def test_the_split_takes_the_lowest_share_of_hashes():
    half = 1 << 63
    assert [m.tolist() for m in split([keys(0, half - 1025, half), keys(5)], 0.5)] == [[True, True, False], [True]]
    many = np.random.default_rng(0).integers(0, 2**64, 10_000, np.uint64)
    assert abs(int(split([many], 0.05)[0].sum()) - 500) < 70


def test_a_small_corpus_holds_out_the_document_with_the_smallest_hash():
    top = 1 << 63
    assert [m.tolist() for m in split([keys(top + 9, top + 7), keys(top + 3, top + 5)], 0.01)] == [[False, False], [True, False]]
    assert [m.tolist() for m in split([keys(top)], 0.01)] == [[False]]
    assert [m.tolist() for m in split([keys(0, 1)], 0.0)] == [[False, False]]


def test_a_document_stays_on_its_side_when_others_come(text_folder: Path):
    def held_out(folder: Path) -> set[str]:
        source = open_source(SourceConfig(kind="text", path=str(folder)))
        (mask,) = split([source.inventory.keys], 0.3)
        return {fact.file.key for fact, held in zip(source._facts, mask, strict=True) if held}  # pyright: ignore[reportAttributeAccessIssue]

    before = held_out(text_folder)
    for i in range(10):
        (text_folder / f"new{i}.txt").write_text("new")
    after = held_out(text_folder)
    assert before == {key for key in after if not key.startswith("new")} and 0 < len(before) < 30


def test_the_tokenizer_sees_the_training_split_alone(text_folder: Path):
    source = open_source(SourceConfig(kind="text", path=str(text_folder)))
    mask = np.arange(30) % 3 == 0
    everything = [text for index, text in source.read() if not mask[index]]
    assert list(bpe_sample([(source, mask)])) == everything
    sample = list(bpe_sample([(source, mask)], budget=800))
    assert 0 < len(sample) < len(everything) and all(len(piece) <= 50 for piece in sample)


@pytest.mark.parametrize(("alphabets", "better"), [(["abcdefgh"] * 2, "together"), (["abcdefgh", "12345678"], "alone")])
def test_gzip_is_given_the_better_of_one_stream_and_many(make_config, tmp_path: Path, alphabets: list[str], better: str):
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list(alphabets[i % 2]), 3000)) + "é" for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    corpus = open_corpus(make_config(data={"sources": [{"kind": "jsonl", "path": str(tmp_path / "rows.jsonl")}], "val_fraction": 0.6}))
    held = [t for t, out in zip(texts, corpus.held_out[0], strict=True) if out]
    sizes = {"together": len(gzip.compress("".join(held).encode(), 9)), "alone": sum(len(gzip.compress(t.encode(), 9)) for t in held)}
    assert corpus.held_out_bytes == len("".join(held).encode()) > 6000
    assert min(sizes, key=lambda way: sizes[way]) == better
    assert corpus.gzip_bits_per_byte == 8 * sizes[better] / corpus.held_out_bytes


def test_documents_with_nothing_to_train_are_dropped_and_counted(make_config, tmp_path: Path):
    rows = ["", "a", "", "b c", ""]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in rows))
    source = {"kind": "jsonl", "path": str(tmp_path / "rows.jsonl")}
    (part,) = open_corpus(make_config(data={"sources": [source], "val_fraction": 0.0})).parts
    assert (part.dropped, len(part.training.length)) == (3, 2)


def test_a_set_with_nothing_to_train_says_so(make_config, tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"text": ""}\n' * 4)
    with pytest.raises(DataError, match=r"nothing to train: of 4 document\(s\), 4 were dropped because they have no token to predict"):
        open_corpus(make_config(data={"sources": [{"kind": "jsonl", "path": str(tmp_path / "rows.jsonl")}], "val_fraction": 0.0}))


def test_a_file_without_rows_is_an_error(make_config, tmp_path: Path):
    (tmp_path / "rows.jsonl").touch()
    with pytest.raises(DataError, match=r"rows.jsonl: no document in its 1 file"):
        open_corpus(make_config(data={"sources": [{"kind": "jsonl", "path": str(tmp_path / "rows.jsonl")}]}))


def test_a_source_of_a_mixture_that_is_missing_is_an_error(make_config, text_folder: Path):
    sources = [{"kind": "text", "path": str(text_folder)}, {"kind": "text", "path": str(text_folder / "nowhere")}]
    with pytest.raises(DataError, match=r"nowhere: no such file or folder"):
        open_corpus(make_config(data={"sources": sources}))


def test_a_model_smaller_than_its_tokenizer_is_refused(make_config, text_folder: Path):
    with pytest.raises(ConfigError, match=r"model.vocab_size=280 is smaller than the tokenizer's 300"):
        open_corpus(make_config(data={"sources": [{"kind": "text", "path": str(text_folder)}]}, vocab_size=280))


def test_synthetic_documents_have_the_asked_lengths_and_ids(make_config):
    (part,) = open_corpus(make_config(data={"sources": [{"kind": "synthetic", "documents": 500, "length": 20}]}, vocab_size=50)).parts
    assert (part.store.length.min(), part.store.length.max()) == (10, 30)
    assert abs(part.store.length.mean() - 20) < 1
    counts = np.bincount(part.store.tokens, minlength=50)
    assert len(counts) == 50 and counts.min() > 0.6 * counts.mean()


LONG_LINE = """
import re, sys, time
from pathlib import Path
from telamon.config.schema import RunConfig
from telamon.data.corpus import open_corpus
def peak(): return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
base = peak()
began = time.perf_counter()
source = {"kind": sys.argv[1], "path": sys.argv[2]}
cfg = RunConfig.model_validate({"data": {"sources": (source,), "cache_dir": sys.argv[3], "val_fraction": 0.0}})
(part,) = open_corpus(cfg).parts
print(part.store.bytes.sum(), (peak() - base) // 1024, time.perf_counter() - began)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "unit"), [("text", "some words of a line "), ("jsonl", "x")])
def test_a_line_of_200_megabytes_is_one_document_in_bounded_memory(tmp_path: Path, kind: str, unit: str):
    size = 200_000_000
    text = (unit * (size // len(unit) + 1))[:size]
    file = tmp_path / f"long.{kind}"
    file.write_text(text if kind == "text" else json.dumps({"text": text}))
    command = [sys.executable, "-c", LONG_LINE, kind, str(file), str(tmp_path / "cache")]
    began = time.perf_counter()
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    stored, megabytes, _ = result.stdout.split()
    print(kind, repr(unit), result.stdout, time.perf_counter() - began)
    assert int(stored) == size
    assert int(megabytes) < 1500
    assert time.perf_counter() - began < 240
