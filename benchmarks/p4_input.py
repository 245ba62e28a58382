"""P4: tokens a second of the input pipeline on one core, against the `tokenizers` library alone on the same text."""

import os
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.results import Result, versions_here

ROUNDS = 5


def run(rounds: int) -> Result:
    """In turns: files to batches with Telamon, and texts in memory to ids with the library."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.environ["RAYON_NUM_THREADS"] = "1"  # the library's threads, read when it first encodes

    from telamon.config.load import load_run
    from telamon.data.corpus import open_corpus
    from telamon.data.tokenizer import TextTokenizer

    with tempfile.TemporaryDirectory() as folder:
        config = load_run("default", [f"data.cache_dir={folder}/first", "data.epochs=1", "eval.every=null"]).config
        corpus = open_corpus(config)  # trains the tokenizer, which both sides then use
        assert isinstance(corpus.tokenizer, TextTokenizer)
        corpus.tokenizer.export(Path(folder) / "tokenizer")
        texts = _texts(corpus)
        taken: dict[str, list[float]] = {"tokenizers alone": [], "Telamon, files to batches": []}
        for number in range(rounds):
            taken["tokenizers alone"].append(_library(f"{folder}/tokenizer/tokenizer.json", texts))
            taken["Telamon, files to batches"].append(_pipeline(folder, number))
            print(f"  round {number + 1}/{rounds}  " + ", ".join(f"{name} {v[-1]:,.0f} tokens/s" for name, v in taken.items()), flush=True)
    return _result(taken, texts)


def _texts(corpus) -> list[str]:
    """Every document of the corpus as a string."""
    documents: dict[int, str] = {}
    for source in corpus.sources:
        for document, piece in source.read():
            documents[document] = documents.get(document, "") + piece
    return list(documents.values())


def _library(file: str, texts: list[str]) -> float:
    """Tokens a second of the library's fastest call, with the texts in memory and nothing done with the ids."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(file)
    began = time.perf_counter()
    count = sum(len(encoding) for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    return count / (time.perf_counter() - began)


def _pipeline(folder: str, number: int) -> float:
    """Tokens a second from reading files to the last batch of an epoch, with an empty token cache."""
    from telamon.config.load import load_run
    from telamon.data.loader import open_loader

    values = [f"data.cache_dir={folder}/cache{number}", f"data.tokenizer.path={folder}/tokenizer", "data.epochs=1"]
    config = load_run("default", values).config
    began = time.perf_counter()
    loader = open_loader(config)
    assert loader.rows_available is not None
    steps = -(-loader.rows_available // config.train.batch_size)
    count = sum(int((batch["segments"] > 0).sum()) for batch in loader.batches(0, steps))
    return count / (time.perf_counter() - began)


def _result(taken: dict[str, list[float]], texts: list[str]) -> Result:
    library, ours = taken.values()
    share = median(mine / theirs for theirs, mine in zip(library, ours, strict=True))
    size = sum(len(text.encode()) for text in texts)
    return Result(
        id="P4",
        title="input pipeline on one core: tokenise, pack and batch, against the tokenizers library alone",
        columns=("side", "median tokens/s", "least", "most"),
        rows=[[name, f"{median(rates):,.0f}", f"{min(rates):,.0f}", f"{max(rates):,.0f}"] for name, rates in taken.items()],
        figures={
            "telamon_tokens_per_second": round(median(ours)),
            "tokenizers_tokens_per_second": round(median(library)),
            "share_of_tokenizers": round(share, 3),
        },
        target="at least 0.85 of the tokenizers library's tokens/s",
        holds=share >= 0.85,
        commands={"both": "python -m benchmarks P4"},
        versions={"both": versions_here("tokenizers", "grain", "numpy")},
        threads="one core for the whole benchmark, by the process's affinity",
        notes=[
            f"The text: Python's standard library, {len(texts):,} documents, {size / 1e6:.1f} MB; a byte-level BPE of 4,096, trained before.",
            "Telamon's time runs from opening the files to the last batch of an epoch [16, 256], token cache written on the way. "
            "The library gets the same documents as strings in memory (`encode_batch_fast`), and its ids are only counted.",
            f"{len(ours)} rounds, sides in turns in one process; the share is the median of the shares within a round.",
        ],
    )
