"""telamon generate: texts from a run's newest whole checkpoint, and short answers to what cannot be done."""

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
def runs(tmp_path_factory):
    """A folder that holds the run `runs/night` with checkpoints of two steps."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "text").mkdir()
    overrides = ["model.preset=tiny-llama", "model.vocab_size=320", "train.seq_len=64", "run.name=night", f"run.root={folder / 'runs'}"]
    config = load_run(overrides=overrides).config
    run = create_run(config)
    tokenizer = train_bpe([TEXT] * 4, vocab_size=300)
    (folder / "runs" / "night" / TOKENIZER).mkdir()
    tokenizer.export(folder / "runs" / "night" / TOKENIZER)
    model = Model(config.model.spec())
    with run.store(config) as store:
        for step in (3, 6):
            weights = jax.jit(model.init)(jax.random.key(step))
            weights["embedding"] *= 20.0
            store.save(step, {"weights": weights, "other": jax.numpy.zeros(3)}, {})
    return folder


@pytest.fixture
def here(runs, monkeypatch):
    monkeypatch.chdir(runs)
    return runs


def test_a_run_is_found_by_name_by_path_and_as_the_newest(telamon, here):
    words = ["def main(", "--max-tokens", "8"]
    named = telamon("generate", "--run", "night", *words)
    assert named.code == 0, named.err
    assert named.out.startswith("def main(") and len(named.out) > len("def main(\n")
    assert "night, step 6" in named.err and "8 tokens" in named.err and "length" in named.err
    assert telamon("generate", "--run", "runs/night/", *words).out == named.out
    assert telamon("generate", *words).out == named.out


def test_texts_come_in_the_order_of_their_prompts_and_are_those_of_each_alone(telamon, here):
    both = telamon("generate", "def ", "class ", "--max-tokens", "20", "--seed", "3")
    alone = [telamon("generate", prompt, "--max-tokens", "20", "--seed", "3") for prompt in ("def ", "class ")]
    assert both.out == alone[0].out + "\n" + alone[1].out


def test_greedy_does_not_depend_on_the_seed_and_drawing_does(telamon, here):
    def text(*words):
        return telamon("generate", "def ", "--max-tokens", "12", *words).out

    assert text("--greedy") == text("--greedy", "--seed", "5") == text("--temperature", "0")
    assert text("--temperature", "1.5") != text("--temperature", "1.5", "--seed", "5")


def test_a_stop_string_ends_the_text_before_it(telamon, here):
    words = ["generate", "def ", "--max-tokens", "30", "--temperature", "1.5", "--top-k", "200", "--top-p", "0.99"]
    whole = telamon(*words).out.removeprefix("def ").removesuffix("\n")
    mark = whole[10:12].replace("\n", "\\n")
    answer = telamon(*words, "--stop", mark, "--stop", "never in there")
    assert answer.out == "def " + whole[: whole.index(whole[10:12])] + "\n"
    assert "stop" in answer.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--greedy", "--top-k", "5", "p"], "leave out --temperature, --top-k and --top-p"),
        (["--import", "no_such_module", "p"], "no_such_module"),
        (["--run", "nigt", "p"], "no run at nigt (a folder with a config.yaml); runs in runs/: night"),
        (["--run", "text", "p"], "no run at text"),
        (["--run", "", "p"], "no run at '' (a folder"),
        (["p" * 300], "do not fit the 64 tokens the model was trained on"),
        (["p", "--max-tokens", "100"], "--max-tokens can be at most 62"),
        (["p", "--max-tokens", "0"], "max_tokens=0"),
        (["p", "--temperature", "-1"], "temperature=-1.0"),
        (["p", "--top-p", "2"], "top_p=2.0"),
        (["p", "--top-k", "0"], "top_k=0"),
        (["p", "--seed", "-1"], "--seed -1"),
        (["p", "--stop", ""], "empty stop string"),
        ([], "Missing argument"),
    ],
)
def test_bad_input_gets_one_short_message(telamon, here, words, message):
    answer = telamon("generate", *words)
    assert answer.code == 2
    assert message in answer.err and "Traceback" not in answer.err
    if words:
        assert len(answer.err.strip().splitlines()) <= 2
    assert answer.out == ""


def test_where_there_is_no_run_the_newest_cannot_be_found(telamon, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer = telamon("generate", "p")
    assert answer.code == 2 and "no run in runs/ yet" in answer.err


def test_another_tokenizer_than_that_of_the_training_needs_a_flag(telamon, here):
    record = here / "runs" / "night" / "text.json"
    TextRecord("0" * 64).write(str(record.parent))
    words = ("generate", "--run", "night", "def ", "--max-tokens", "2")
    try:
        refused = telamon(*words)
        assert refused.code == 2 and "another tokenizer: its hash is 0000" in refused.err
        assert telamon(*words, "--allow-mismatch").code == 0
    finally:
        record.unlink()


def test_a_run_without_a_checkpoint_says_so(telamon, here):
    create_run(load_run(overrides=["run.name=young", f"run.root={here / 'runs'}", "data.sources=[{kind: synthetic}]"]).config)
    try:
        answer = telamon("generate", "--run", "young", "1 2 3")
    finally:
        (here / "runs" / "young" / "config.yaml").unlink()
    assert answer.code == 5 and "young holds no whole checkpoint yet" in answer.err


@pytest.mark.slow
def test_a_run_just_trained_can_be_continued_from(telamon, tmp_path, monkeypatch):
    """Training leaves all that generation needs, and samples in the terminal and the run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / "text" / f"{number}.py").write_text(TEXT.replace("main", f"main_{number}") * 5)
    trained = telamon(
        "train",
        "tiny",
        "run.name=one",
        "data.sources=[{kind: text, path: text}]",
        "data.val_fraction=0.1",
        "sample.tokens=8",
        "train.steps=2",
    )
    assert trained.code == 0, trained.err
    samples = (tmp_path / "runs" / "one" / "samples.txt").read_text()
    assert "def main(" in samples and samples in trained.out
    answer = telamon("generate", "--run", "one", "def main(", "--max-tokens", "8")
    assert answer.code == 0 and answer.out.startswith("def main(")
