"""telamon export: a run as a Hugging Face folder; and short answers to what cannot be done."""

import shutil

import ml_dtypes
import numpy as np
import pytest
from checkpoint_folders import llama_config, llama_tensors, read_folder, write_folder

from telamon.data.chat_template import find_template
from telamon.data.tokenizer import train_bpe
from telamon.hub.importing import import_from
from telamon.infer.text_record import TextRecord
from telamon.watch.log import make_console


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder that holds the run runs/tiny."""
    folder = tmp_path_factory.mktemp("work")
    source = write_folder(folder / "source", llama_tensors(), llama_config())
    import_from(str(source), folder / "runs" / "tiny", console=make_console(quiet=True))
    return folder


@pytest.fixture
def here(runs, tmp_path, monkeypatch):
    """The export's folder; the working directory holds the run."""
    monkeypatch.chdir(runs)
    return tmp_path


@pytest.mark.parametrize("run", ["tiny", "runs/tiny"])
def test_a_run_is_found_by_name_and_by_path(telamon, here, run):
    answer = telamon("export", run, here / "out")
    assert answer.code == 0, answer.err
    assert "runs/tiny, step 0" in answer.out and "memory: at most" in answer.out and "GB/s" in answer.out
    assert answer.out.splitlines()[-1].startswith(f"{here / 'out'} is ready: AutoModelForCausalLM.from_pretrained(")
    assert "vllm serve" not in answer.out  # it would ask for a tokenizer
    exported = read_folder(here / "out")
    assert all(np.array_equal(exported[name], array) for name, array in llama_tensors().items())


def test_type_and_size_of_files_can_be_chosen(telamon, here):
    answer = telamon("export", "tiny", here / "out", "--dtype", "bfloat16", "--max-shard-size", "20kB")
    assert answer.code == 0, answer.err
    assert len(list((here / "out").glob("model-*-of-*.safetensors"))) > 1 and (here / "out" / "model.safetensors.index.json").is_file()
    assert {array.dtype for array in read_folder(here / "out").values()} == {np.dtype(ml_dtypes.bfloat16)}


def test_another_tokenizer_or_template_than_that_of_the_training_needs_a_flag(telamon, here, runs):
    """What an export writes is what was used."""
    folder = runs / "runs" / "tiny" / "tokenizer"
    tokenizer = train_bpe(["the cat sat on the mat"], vocab_size=280)
    tokenizer.export(folder)
    (folder / "chat_template.jinja").write_text("used")
    TextRecord.of(tokenizer, find_template(folder)).write(str(folder.parent))
    try:
        assert telamon("export", "tiny", here / "same").code == 0
        assert (here / "same" / "chat_template.jinja").read_text() == "used"
        (folder / "chat_template.jinja").write_text("another")
        refused = telamon("export", "tiny", here / "out")
        assert refused.code == 2 and "another chat template" in refused.err and not (here / "out").exists()
        assert telamon("export", "tiny", here / "out", "--allow-mismatch").code == 0
        assert (here / "out" / "chat_template.jinja").read_text() == "another"
    finally:
        shutil.rmtree(folder)
        (folder.parent / "text.json").unlink()


def test_an_earlier_export_is_replaced_only_when_asked(telamon, here):
    assert telamon("export", "tiny", here / "out").code == 0
    answer = telamon("export", "tiny", here / "out", "--dtype", "bfloat16")
    assert answer.code == 2 and "out exists already; choose another name, or replace it with --overwrite" in answer.err
    assert telamon("export", "tiny", here / "out", "--dtype", "bfloat16", "--overwrite").code == 0
    assert {array.dtype for array in read_folder(here / "out").values()} == {np.dtype(ml_dtypes.bfloat16)}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tinny", "{out}"], "no run at tinny (a folder with a config.yaml); runs in runs/: tiny"),
        (["tiny", "{out}", "--dtype", "float8"], "--dtype float8 is not possible; choose float32 or bfloat16"),
        (["tiny", "{out}", "--max-shard-size", "big"], "'big' is not a size; write it as 5GB or 500MB"),
        (["tiny", "{out}", "--import", "no_such_module"], "no_such_module"),
        (["tiny", "source", "--overwrite"], "choose another name"),
        (["tiny"], "Missing argument"),
    ],
)
def test_what_cannot_be_exported_gets_one_short_message(telamon, here, runs, words, message):
    if words[1:2] == ["source"]:
        (runs / "source" / "config.json").rename(runs / "source" / "kept.json")
    answer = telamon("export", *(word.format(out=here / "out") for word in words))
    assert answer.code == 2 and message in answer.err and "Traceback" not in answer.err
    assert not (here / "out").exists()
