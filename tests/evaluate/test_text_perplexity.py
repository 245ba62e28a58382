"""Perplexity against token-by-token formulas, and against the evaluation of the run itself."""

import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tiny
import tokenizers as hf
from hypothesis import given
from hypothesis import strategies as st

from telamon.config.load import load_run
from telamon.config.schema import MeshConfig
from telamon.data.loader import open_loader
from telamon.data.tokenizer import IdTokenizer, TextTokenizer, train_bpe
from telamon.errors import ConfigError, DataError
from telamon.evaluate.perplexity import count_windows, cut, perplexity, read_text_file
from telamon.infer.run import OpenedRun
from telamon.models.weights import Model
from telamon.parallel.mesh import build_mesh
from telamon.train.evaluation import evaluate
from telamon.train.job import make_job

TEXT = "the cat sat on the mat, the naïve dog ate 数学 and the rest of it; " * 3


def opened(tokenizer, *, seed=1, seq_len=16, config=None) -> OpenedRun:
    config = config or tiny.run(model={"vocab_size": 300}, seq_len=seq_len)
    model = Model(config.model.spec())
    return OpenedRun("runs/one", config, 3, model, tiny.weights(model, seed=seed), build_mesh(MeshConfig()), tokenizer, None, frozenset())


@pytest.fixture(scope="module")
def bpe() -> TextTokenizer:
    return train_bpe([TEXT] * 3, vocab_size=300)


@given(tokens=st.integers(2, 60), width=st.integers(1, 20), stride=st.integers(1, 20), rows=st.integers(1, 5))
def test_every_token_is_predicted_once_from_those_before_it(tokens, width, stride, rows):
    stride = min(stride, width)
    ids = np.arange(100, 100 + tokens, dtype=np.int32)
    batches = list(cut(ids, width=width, stride=stride, rows=rows))
    whole = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    scored = whole["mask"] == 1
    assert sorted(whole["targets"][scored]) == list(ids[1:])
    # What comes before a target is its window's beginning, in order, and enough of it.
    for row in range(len(scored)):
        length = int(whole["segments"][row].sum())
        assert whole["tokens"][row, :length].tolist() == list(range(int(whole["tokens"][row, 0]), int(whole["tokens"][row, 0]) + length))
        assert whole["positions"][row, :length].tolist() == list(range(length)) and not whole["segments"][row, length:].any()
        assert (whole["targets"][row][scored[row]] == whole["tokens"][row][scored[row]] + 1).all()
        assert (np.flatnonzero(scored[row]) + 1 >= (min(width - stride, length) + 1 if row else 1)).all()
    assert count_windows(tokens, width=width, stride=stride) == int(whole["segments"].any(axis=1).sum())


@pytest.mark.parametrize(("context", "stride", "batch_size"), [(16, None, None), (16, 5, 8), (1000, None, None)])
def test_the_loss_is_that_of_each_window_alone(bpe, context, stride, batch_size):
    run = opened(bpe)
    ids = [0, *bpe.encode(TEXT)]
    found = perplexity(run, TEXT, context=context, stride=stride, batch_size=batch_size)
    width = min(context, len(ids) - 1)
    step = min(stride or context, width)
    nll = []
    for begin in range(0, len(ids) - 1, step):
        row = ids[begin : min(begin + width, len(ids) - 1)]
        if begin and begin + width - step >= len(ids) - 1:
            break
        padded = np.zeros((1, width), np.int32)
        padded[0, : len(row)] = row
        real = (np.arange(width) < len(row)).astype(np.int32)[None]
        logits = np.asarray(_logits(run.model)(run.weights, padded, real), np.float64)[0, : len(row)]
        logits -= logits.max(axis=-1, keepdims=True)
        shares = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        targets = ids[begin + 1 : begin + len(row) + 1]
        first = width - step if begin else 0
        nll += [-shares[i, target] for i, target in enumerate(targets) if i >= first]
    assert len(nll) == found.tokens == len(ids) - 1
    assert found.loss == pytest.approx(np.mean(nll), rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(found.loss), rel=1e-12)
    assert found.bits_per_byte == pytest.approx(np.sum(nll) / math.log(2) / len(TEXT.encode()), rel=1e-5)
    assert (found.context, found.stride) == (width, step)


_COMPILED = {}


def _logits(model):
    def forward(weights, tokens, real):
        positions = np.arange(tokens.shape[1], dtype=np.int32)[None]
        return tiny.logits(model.bind(weights), {"tokens": tokens, "positions": positions, "segments": real})

    return _COMPILED.setdefault(id(model), jax.jit(forward))


def test_a_text_costs_what_it_costs_in_the_evaluation_of_the_run(tmp_path):
    """The held-out file, cut into the same rows: one loss, whatever the batch size."""
    (tmp_path / "text").mkdir()
    for number in range(6):
        (tmp_path / "text" / f"{number}.txt").write_text(TEXT.replace("cat", f"cat {number}") * (1 + number % 3))
    config = load_run(
        None,
        [
            f'data.sources=[{{kind: text, path: "{tmp_path}/text"}}]',
            f"data.cache_dir={tmp_path}/cache",
            "data.tokenizer.vocab_size=300",
            "data.val_fraction=0.01",  # the one with the smallest hash
            "model.preset=tiny-llama",
            "model.vocab_size=300",
            "train.seq_len=16",
            "train.batch_size=8",
            "train.compute_dtype=float32",
        ],
    ).config
    loader = open_loader(config)
    (text,) = [piece.decode() for piece in loader.corpus.held_out_texts() if piece]
    job = make_job(config)
    run = opened(loader.tokenizer, config=config)
    expected = evaluate(job, run.weights, loader)
    assert expected is not None
    found = perplexity(run, text, end=True, batch_size=16)
    assert found.tokens == expected.tokens and found.windows > 8
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found.bits_per_byte == pytest.approx(expected.bits_per_byte, rel=1e-6)
    job._pool.shutdown()


def test_without_bos_the_first_token_is_given(bpe):
    inner = hf.Tokenizer.from_str(bpe.to_json())
    run = opened(TextTokenizer(inner, bos=None, eos="<|eos|>"))
    ids = run.tokenizer.encode(TEXT)
    assert perplexity(run, TEXT).tokens == len(ids) - 1
    assert perplexity(run, TEXT, end=True).tokens == len(ids)
    one = inner.decode([max(ids)])
    with pytest.raises(DataError, match="is one token"):
        perplexity(run, one)


def test_progress_counts_windows(bpe):
    """In a run trained with a kernel of TPUs, which is nothing to this machine."""
    seen = []
    run = opened(bpe, config=tiny.run(model={"vocab_size": 300}, seq_len=16, loss="tokamax", attention="splash"))
    found = perplexity(run, TEXT, batch_size=8, on_windows=lambda *at: seen.append(at))
    assert [done for done, _ in seen] == [*range(8, found.windows, 8), found.windows]
    assert {total for _, total in seen} == {found.windows}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"stride": 17}, "stride of 17.*windows of 16; give 1 to 16"),
        ({"context": 8, "stride": 9}, "give 1 to 8"),
        ({"batch_size": 0}, "batch of 0"),
    ],
)
def test_sizes_that_are_not_possible_are_refused(bpe, sizes, message):
    with pytest.raises(ConfigError, match=message):
        perplexity(opened(bpe), TEXT, **sizes)


def test_a_run_of_mere_ids_and_positions_that_there_are_not_are_refused(bpe):
    with pytest.raises(ConfigError, match="never text"):
        perplexity(opened(IdTokenizer(64)), TEXT)
    run = opened(bpe)
    limited = SimpleNamespace(train=run.config.train, model=SimpleNamespace(position_limit=12))
    object.__setattr__(run, "config", limited)
    with pytest.raises(ConfigError, match="has 12 positions; give at most 12"):
        perplexity(run, TEXT)


def test_a_token_that_the_model_has_no_row_for_is_refused(bpe):
    """A look-up beyond the table would take its last row."""
    largest = max(bpe.encode(TEXT))
    with pytest.raises(ConfigError, match=f"the text has the token {largest}, and the model has {largest} rows"):
        perplexity(opened(bpe, config=tiny.run(model={"vocab_size": largest}, seq_len=16)), TEXT)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    for content, message in ((None, "cannot be read"), (b"", "is empty"), (b"abc\xff", r"not UTF-8 text \(byte 3\)")):
        if content is not None:
            (tmp_path / "a.txt").write_bytes(content)
        with pytest.raises(DataError, match=message):
            read_text_file(tmp_path / "a.txt")
