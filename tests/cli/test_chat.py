"""telamon chat: turns through a pipe, and the template that a run was trained with."""

import io
import json
import shutil
import sys
from pathlib import Path

import jax
import pytest

from telamon.config.load import load_run
from telamon.data.chat_template import FILE, find_template
from telamon.data.tokenizer import load_tokenizer
from telamon.infer.run import TOKENIZER
from telamon.infer.text_record import TextRecord
from telamon.models.weights import Model
from telamon.train.run_dir import create_run

CHAT = Path(__file__).parent.parent / "reference" / "chat"
TEMPLATE = CHAT / "templates" / "chatml.jinja"
OTHER = CHAT / "templates" / "chatml-tools.jinja"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with the runs `plain`, which has no template, and `talker`, which was trained with ours."""
    folder = tmp_path_factory.mktemp("work")
    source = load_tokenizer(str(CHAT / "tokenizers" / "chatml"))
    overrides = ["model.preset=tiny-llama", "model.n_layers=1", "model.vocab_size=320", "train.seq_len=96", f"run.root={folder / 'runs'}"]
    for name in ("plain", "talker"):
        config = load_run(overrides=[*overrides, f"run.name={name}"]).config
        run = create_run(config)
        source.export(folder / "runs" / name / TOKENIZER)
        if name == "talker":
            shutil.copyfile(TEMPLATE, folder / "runs" / name / TOKENIZER / FILE)
        TextRecord.of(source, find_template(folder / "runs" / name / TOKENIZER)).write(run.path)
        model = Model(config.model.spec())
        with run.store(config) as store:
            weights = jax.jit(model.init)(jax.random.key(1))
            weights["embedding"] *= 20.0
            store.save(1, {"weights": weights}, {})
    return folder


@pytest.fixture
def say(telamon, runs, monkeypatch):
    """A function of lines of input and the words after `telamon`."""
    monkeypatch.chdir(runs)

    def call(text: str, *words: str):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        return telamon(*words)

    return call


QUICK = ("--max-tokens", "6")


def test_each_line_of_a_pipe_gets_an_answer(say):
    answer = say("hi\n\nthe cat\n/reset\nhi\n/quit\nmore\n", "chat", "talker", *QUICK, "--greedy")
    assert answer.code == 0, answer.err
    assert "talker, step 1" in answer.err and "a new conversation" in answer.err
    first = say("hi", "chat", "talker", *QUICK, "--greedy").out
    assert first.strip() and answer.out.startswith(first) and answer.out.endswith(first)
    assert len(answer.out) > 2 * len(first)
    assert say("hi", "chat", "runs/talker", *QUICK, "--temperature", "0").out == first


def test_the_system_and_how_tokens_are_drawn_matter(say):
    words = ("talker", *QUICK, "--temperature", "2", "--top-k", "300", "--top-p", "0.999")
    drawn = say("hi", "chat", *words, "--seed", "1").out
    assert say("hi", "chat", *words, "--seed", "1").out == drawn != say("hi", "chat", *words, "--seed", "2").out
    assert say("hi", "chat", *words, "--seed", "1", "--system", "Say ok.").out != drawn
    refused = say("hi", "chat", *words, "--greedy")
    assert refused.code == 2 and "--greedy" in refused.err


def test_a_run_without_a_template_asks_for_one(say):
    answer = say("hi", "chat", "plain")
    assert answer.code == 2 and "has no chat template" in answer.err and "--template FILE" in answer.err
    with_it = say("hi", "chat", "plain", *QUICK, "--greedy", "--template", str(TEMPLATE))
    assert with_it.code == 0 and with_it.out == say("hi", "chat", "talker", *QUICK, "--greedy").out
    missing = say("hi", "chat", "plain", "--template", "no.jinja")
    assert missing.code == 2 and "no.jinja cannot be read" in missing.err


def test_bytes_that_are_not_text_are_said(telamon, say, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff\n"), encoding="ascii"))
    answer = telamon("chat", "talker", *QUICK)
    assert answer.code == 3 and "a message is not UTF-8 text (character 2)" in answer.err and "Traceback" not in answer.err


def test_a_template_that_renders_nothing_is_said(say):
    Path("empty.jinja").write_text("")
    answer = say("hi", "chat", "plain", "--template", "empty.jinja")
    assert answer.code == 3 and "empty.jinja renders this conversation as an empty text" in answer.err


def test_another_template_than_that_of_the_training_is_refused(say):
    """Naming both hashes, unless a flag says otherwise."""

    answer = say("hi", "chat", "talker", "--template", str(OTHER))
    recorded = json.loads(Path("runs/talker/text.json").read_text())["chat_template"]
    assert answer.code == 2 and recorded in answer.err and "another chat template" in answer.err
    assert answer.err.count("--allow-mismatch") == 1 and len(set(_hashes(answer.err))) == 2
    assert say("hi", "chat", "talker", *QUICK, "--template", str(OTHER), "--allow-mismatch").code == 0


def test_another_tokenizer_of_the_same_size_is_refused(say, telamon, monkeypatch):
    file = Path("runs/talker") / TOKENIZER / "tokenizer.json"
    before = file.read_text()
    layout = json.loads(before)
    vocab = layout["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(layout))
    try:
        for words in (["chat", "talker"], ["generate", "--run", "talker", "x"]):
            answer = telamon(*words)
            assert answer.code == 2 and "another tokenizer" in answer.err and len(set(_hashes(answer.err))) == 2
        assert say("hi", "chat", "talker", *QUICK, "--allow-mismatch").code == 0
        assert telamon("generate", "--run", "talker", "x", "--max-tokens", "2", "--allow-mismatch").code == 0
    finally:
        file.write_text(before)


def test_a_conversation_that_is_too_long_is_said(say):
    answer = say("hi " * 200, "chat", "talker")
    assert answer.code == 2 and "trained on 96 at a time" in answer.err


def test_modules_of_ones_own_are_imported(say):
    answer = say("hi", "chat", "talker", "--import", "no_such_module")
    assert answer.code == 2 and "no_such_module" in answer.err


def _hashes(text: str) -> list[str]:
    return [word.strip(",;:") for word in text.split() if len(word.strip(",;:")) == 64]
