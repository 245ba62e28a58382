"""telamon perplexity: figures for people and for programs."""

import json

import jax
import pytest

from telamon.config.load import load_run
from telamon.data.tokenizer import train_bpe
from telamon.infer.run import TOKENIZER
from telamon.infer.text_record import TextRecord
from telamon.models.weights import Model
from telamon.train.run_dir import create_run

TEXT = "def main(argument):\n    return argument\n\nclass Thing:\n    pass\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the run `runs/night` and a text."""
    folder = tmp_path_factory.mktemp("work")
    overrides = ["model.preset=tiny-llama", "model.n_layers=1", "model.vocab_size=320", "train.seq_len=64", f"run.root={folder / 'runs'}"]
    config = load_run(overrides=[*overrides, "run.name=night"]).config
    run = create_run(config)
    train_bpe([TEXT] * 4, vocab_size=300).export(folder / "runs" / "night" / TOKENIZER)
    model = Model(config.model.spec())
    with run.store(config) as store:
        store.save(2, {"weights": jax.jit(model.init)(jax.random.key(1))}, {})
    (folder / "text.txt").write_text(TEXT * 4)
    return folder


@pytest.fixture(autouse=True)
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)


def test_figures_come_as_text_and_as_json(telamon):
    answer = telamon("perplexity", "night", "text.txt")
    assert answer.code == 0, answer.err
    found = telamon("perplexity", "runs/night", "text.txt", "--json")
    figures = json.loads(found.out)
    assert f"perplexity {figures['perplexity']:.4f}, {figures['loss']:.4f} nats per token" in answer.out
    assert "night, step 2" in answer.err and figures["step"] == 2 and figures["file"] == "text.txt"
    assert 200 < figures["perplexity"] < 400  # of an untrained model with 320 rows


def test_windows_are_as_asked(telamon):
    words = ("perplexity", "night", "text.txt", "--json", "--batch-size", "8")
    plain = json.loads(telamon(*words).out)
    other = json.loads(telamon(*words, "--context", "16", "--stride", "8", "--end").out)
    assert (other["context"], other["stride"], other["tokens"]) == (16, 8, plain["tokens"] + 1)
    assert other["windows"] > plain["windows"] and other["loss"] != plain["loss"]
    several = telamon("perplexity", "night", "text.txt", "--context", "16", "--stride", "8", "--end")
    assert f" in {other['windows']} windows of 16 tokens, 8 apart; " in several.out
    assert several.err.splitlines() == ["runs/night, step 2: text.txt"]  # no bar where there is no terminal


def test_what_cannot_be_measured_is_refused(telamon):
    for words, code, message in (
        (("night", "absent.txt"), 3, "absent.txt cannot be read"),
        (("absent", "text.txt"), 2, "no run at absent"),
        (("night", "text.txt", "--context", "8", "--stride", "9"), 2, "give 1 to 8"),
        (("night", "text.txt", "--import", "no_such_module"), 2, "no_such_module"),
    ):
        answer = telamon("perplexity", *words)
        assert answer.code == code and message in answer.err


def test_another_tokenizer_needs_a_flag(telamon, folder):
    record = folder / "runs" / "night" / "text.json"
    TextRecord("0" * 64).write(str(record.parent))
    try:
        refused = telamon("perplexity", "night", "text.txt")
        assert refused.code == 2 and "another tokenizer" in refused.err
        assert telamon("perplexity", "night", "text.txt", "--allow-mismatch").code == 0
    finally:
        record.unlink()
