import errno
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers as hf

from telamon.config.schema import SourceConfig
from telamon.data import cache
from telamon.data.cache import cached, token_store
from telamon.data.sources import open_source
from telamon.data.tokenizer import TextTokenizer, train_bpe
from telamon.errors import DataError


@pytest.fixture(scope="module")
def bpe() -> TextTokenizer:
    return train_bpe(["def value return range héllo 数 " * 3], vocab_size=290)


def store_of(folder: Path, bpe: TextTokenizer, place: Path) -> cache.TokenStore:
    return token_store(open_source(SourceConfig(kind="text", path=str(folder))), bpe, str(place))


@pytest.mark.parametrize("batch", [1, 64, 1 << 20])
def test_documents_are_their_ids_between_bos_and_eos(text_folder: Path, bpe: TextTokenizer, tmp_path: Path, monkeypatch, batch: int):
    monkeypatch.setattr(cache, "_BATCH", batch)
    monkeypatch.setattr("telamon.data.sources.PIECE", 50)
    (text_folder / "empty.txt").touch()
    store = store_of(text_folder, bpe, tmp_path / "c")
    texts = [
        file.read_text(encoding="utf-8") for file in sorted(text_folder.rglob("*.txt"), key=lambda f: f.relative_to(text_folder).as_posix())
    ]
    for index, text in enumerate(texts):
        ids = store.tokens[store.first[index] : store.first[index + 1]].tolist()
        assert ids[0] == 0 and ids[-1] == 1 and bpe.decode(ids) == text
    assert store.bytes.tolist() == [len(text.encode()) for text in texts]
    assert store.length.sum() == len(store.tokens) and store.tokens.dtype == np.uint16


@pytest.mark.parametrize("adds", ["both", "BOS", "neither"])
@pytest.mark.parametrize(("bos", "eos"), [("<s>", "<s>"), ("<s>", "</s>"), (None, "</s>")])
def test_bos_and_eos_are_there_once_whatever_the_tokenizer_adds_to_a_text(tmp_path: Path, bos: str | None, eos: str, adds: str):
    """One token that is both BOS and EOS stands on both sides of a document."""
    inner = hf.Tokenizer(hf.models.WordLevel({"<s>": 0, "</s>": 1, "x": 2, "y": 3}, unk_token="y"))
    inner.add_special_tokens(["<s>", "</s>"])
    inner.pre_tokenizer = hf.pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    if adds != "neither":
        single = "<s> $A </s>" if adds == "both" else "<s> $A"
        inner.post_processor = hf.processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
            single=single, special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    (tmp_path / "texts").mkdir()
    for name, text in (("a", "x"), ("b", "x y")):
        (tmp_path / "texts" / f"{name}.txt").write_text(text)
    store = store_of(tmp_path / "texts", TextTokenizer(inner, bos=bos, eos=eos), tmp_path / "c")
    opening, closing = [] if bos is None else [0], [0 if eos == "<s>" else 1]
    assert store.tokens.tolist() == [*opening, 2, *closing, *opening, 2, 3, *closing]


def test_tokens_are_made_once_for_content_tokenizer_and_reading(text_folder: Path, bpe: TextTokenizer, tmp_path: Path, monkeypatch):
    made = []
    monkeypatch.setattr(cache, "_tokenise", lambda *given, real=cache._tokenise: (made.append(given), real(*given)))
    place = tmp_path / "c"
    for _ in range(2):
        store_of(text_folder, bpe, place)
    assert len(made) == 1
    moved = text_folder.rename(tmp_path / "moved")
    store_of(moved, bpe, place)
    assert len(made) == 1
    (moved / "more.txt").write_text("more")
    store_of(moved, bpe, place)
    store_of(moved, train_bpe(["other"], vocab_size=280), place)
    assert len(made) == 3


@pytest.mark.parametrize("damage", ["cut", "gone", "garbled"])
def test_a_damaged_cache_is_made_again(text_folder: Path, bpe: TextTokenizer, tmp_path: Path, damage: str):
    before = store_of(text_folder, bpe, tmp_path / "c").tokens.tolist()
    (folder,) = (p for p in (tmp_path / "c" / "tokens").iterdir() if p.is_dir())
    file = folder / "tokens.bin"
    if damage == "cut":
        os.truncate(file, file.stat().st_size - 10)
    elif damage == "gone":
        (folder / "first.npy").unlink()
    else:
        (folder / "facts.json").write_text("{")
    assert store_of(text_folder, bpe, tmp_path / "c").tokens.tolist() == before


PROGRAM = """
import sys, time
from pathlib import Path
from telamon.data import cache
real = cache._tokenise
def slow(source, tokenizer, folder):
    print("begun", flush=True)
    with cache.Path(sys.argv[3]).open("a") as log: log.write("x")
    real(source, tokenizer, folder)
    time.sleep(float(sys.argv[4]))
cache._tokenise = slow
from telamon.config.schema import SourceConfig
from telamon.data.sources import open_source
from telamon.data.tokenizer import train_bpe
bpe = train_bpe(["def value return range héllo 数 " * 3], vocab_size=290)
store = cache.token_store(open_source(SourceConfig(kind="text", path=sys.argv[1])), bpe, sys.argv[2])
print(len(store.tokens), int(store.tokens.sum()))
"""


def start(folder: Path, place: Path, log: Path, sleep: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, str(folder), str(place), str(log), str(sleep)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_process_killed_while_writing_leaves_no_cache(text_folder: Path, bpe: TextTokenizer, tmp_path: Path):
    process = start(text_folder, tmp_path / "c", tmp_path / "log", 60)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    halves: list[Path] = []
    deadline = time.monotonic() + 30
    while not halves and time.monotonic() < deadline:
        halves = list((tmp_path / "c" / "tokens").glob(".half-*/tokens.bin"))
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert halves and not [p for p in (tmp_path / "c" / "tokens").iterdir() if not p.name.startswith(".")]
    assert store_of(text_folder, bpe, tmp_path / "c").tokens.tolist() == store_of(text_folder, bpe, tmp_path / "other").tokens.tolist()


def test_of_two_processes_one_tokenises_and_both_read(text_folder: Path, tmp_path: Path):
    processes = [start(text_folder, tmp_path / "c", tmp_path / "log", 0.5) for _ in range(2)]
    results = [process.communicate()[0].splitlines() for process in processes]
    assert results[0][-1] == results[1][-1]
    assert (tmp_path / "log").read_text() == "x"


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"file/tokens/x: the cache cannot be written: Not a directory; free space, or set data.cache_dir"):
        cached(tmp_path / "file" / "tokens" / "x", lambda half: half.mkdir(), lambda place: None)


def test_a_full_disk_is_named_and_leaves_no_cache(text_folder: Path, bpe: TextTokenizer, tmp_path: Path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
    try:
        with pytest.raises(DataError, match=rf"/c/tokens/[0-9a-f]+: the cache cannot be written: {os.strerror(errno.EFBIG)}"):
            store_of(text_folder, bpe, tmp_path / "c")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert store_of(text_folder, bpe, tmp_path / "c").first[-1] > 0
