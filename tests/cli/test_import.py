"""telamon import: a run from a folder, a repository or a GGUF file, that generates at once; and short answers to what cannot be done."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny_gguf
from checkpoint_folders import llama_config, llama_tensors, read_folder, write_folder
from huggingface_hub import constants
from loopback_hub import serving

from telamon.config import registry
from telamon.config.load import load_run
from telamon.data.tokenizer import train_bpe

TEXT = "def main(argument):\n    return argument\n\nclass Thing:\n    pass\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A Llama with a tokenizer, as the Hub holds one."""
    tokenizer = train_bpe([TEXT] * 4, vocab_size=280)
    rows = tokenizer.vocab_size
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    write_folder(folder, llama_tensors(vocabulary=rows), llama_config(vocab_size=rows), shards=2)
    tokenizer.export(folder)
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_folder_becomes_a_run_that_generates(telamon, here, model):
    answer = telamon("import", model)
    assert answer.code == 0, answer.err
    assert "parameters" in answer.out and "memory: at most" in answer.out and "GB/s" in answer.out
    assert answer.out.splitlines()[-1] == "runs/tiny-llama is ready: telamon generate --run runs/tiny-llama PROMPT"
    assert os.listdir("runs") == ["tiny-llama"]
    text = telamon("generate", "--run", "tiny-llama", "def main(", "--max-tokens", "5", "--greedy")
    assert text.code == 0 and text.out.startswith("def main(") and "5 tokens" in text.err


def test_the_last_line_says_what_the_run_is_good_for(telamon, here, model):
    """A chat where there is a template; without a tokenizer, no command that would need one."""
    shutil.copytree(model, "talker")
    Path("talker/chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    assert telamon("import", "talker").out.splitlines()[-1] == "runs/talker is ready: telamon chat runs/talker"
    shutil.copytree(model, "mute", ignore=shutil.ignore_patterns("tokenizer*"))
    answer = telamon("import", "mute")
    assert "there is no tokenizer.json" in answer.out
    assert answer.out.splitlines()[-1].startswith("runs/mute is ready: telamon export runs/mute FOLDER")
    refused = telamon("generate", "--run", "mute", "hi")
    assert refused.code == 2 and refused.err == (
        "runs/mute was imported without a tokenizer; put the model's tokenizer.json into runs/mute/tokenizer\n"
    )
    own = ("data.sources=[{kind: text, path: talker/*.json}]", "watch.peak_tflops=1.0", "watch.progress=false")
    refused = telamon("train", "train.init_from=runs/mute", *own)
    assert refused.code == 2 and "train.init_from=runs/mute was imported without a tokenizer" in refused.err
    shutil.copytree(Path("runs/talker/tokenizer"), "runs/mute/tokenizer")  # the way out works
    assert telamon("generate", "--run", "mute", "hi", "--max-tokens", "2").code == 0
    assert telamon("export", "talker", "out").out.endswith(" in transformers, or vllm serve out\n")


def test_an_empty_source_is_no_folder(telamon, here):
    answer = telamon("import", "")
    assert answer.code == 2 and answer.err.startswith("SRC is empty; a model to import is a folder")


def test_an_import_is_not_resumed_as_if_it_had_not_saved_yet(telamon, here, model):
    assert telamon("import", model).code == 0
    answer = telamon("train", "resume=runs/tiny-llama")
    assert answer.code == 2
    assert "an imported model has no training to go on with; begin one with train.init_from=runs/tiny-llama" in answer.err


def test_an_earlier_run_is_replaced_only_when_asked(telamon, here, model):
    assert telamon("import", model, "runs/mine").code == 0
    answer = telamon("import", model, "runs/mine")
    assert answer.code == 2 and answer.err.strip() == "runs/mine exists already; choose another name, or replace it with --overwrite"
    assert telamon("import", model, "runs/mine", "--overwrite").code == 0


def test_a_repository_is_fetched_at_its_revision(telamon, here, model, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(here / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(here / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with serving() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        commit = hub.add("org/tiny", model, revision="v1")
        answer = telamon("import", "org/tiny", "--revision", "v1")
        assert answer.code == 0, answer.err
        assert json.loads((here / "runs" / "tiny" / "hf.json").read_text())["origin"] == f"org/tiny@{commit}"
        for words, message in [
            (["org/tiny"], "has no revision main"),
            (["org/tiny", "--revision", "v2"], "has no revision v2; --revision takes a branch, a tag or a commit"),
            (["org/tinny", "--revision", "v1"], "there is no repository org/tinny"),
        ]:
            refused = telamon("import", *words, "runs/new")
            assert refused.code == 3 and message in refused.err and "Traceback" not in refused.err
        asked = len(hub.asked)
        assert telamon("import", "org/tiny", "--revision", "v1").code == 2  # runs/tiny is there: nothing is asked
        assert len(hub.asked) == asked
    assert os.listdir("runs") == ["tiny"]


def test_a_gguf_file_becomes_a_run_by_its_name_and_goes_out_to_hugging_face(telamon, here):
    weights = tiny_gguf.model("qwen3")
    tiny_gguf.write(here / "small-f32.gguf", "qwen3", tiny_gguf.sizes("qwen3"), weights)
    answer = telamon("import", "small-f32.gguf")
    assert answer.code == 0 and "runs/small-f32 is ready" in answer.out, answer.err
    assert telamon("export", "small-f32", "out").code == 0
    exported = read_folder(here / "out")
    assert np.array_equal(exported["model.layers.1.self_attn.q_proj.weight"], weights["blk.1.attn_q.weight"])
    assert np.array_equal(exported["model.embed_tokens.weight"], weights["token_embd.weight"])


def test_a_family_of_ones_own_is_read_and_found_again(telamon, here, model, monkeypatch):
    monkeypatch.syspath_prepend(here)
    monkeypatch.setattr(registry, "_families", dict(registry._families))  # other tests know nothing of it
    (here / "own_llama.py").write_text(
        "from telamon.config.registry import register_family\n"
        "from telamon.models.llama import LlamaConfig\n"
        "@register_family\n"
        "class OwnLlama(LlamaConfig):\n"
        "    family: str = 'own_llama'\n"
        "    hf_model_types = ('own_llama',)\n"
        "    hf_architecture = 'OwnLlamaForCausalLM'\n"
    )
    config = llama_config(vocab_size=96, model_type="own_llama", architectures=["OwnLlamaForCausalLM"])
    write_folder(here / "own", llama_tensors(), config)
    answer = telamon("import", "own")
    assert answer.code == 2 and "model_type='own_llama' belongs to no family here" in answer.err
    assert telamon("import", "own", "--import", "own_llama").code == 0
    assert load_run("runs/own").config.run.imports == ("own_llama",)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["nothing"], 2, "there is no nothing; a model to import is a folder"),
        (["empty"], 3, "empty is empty; a model folder holds config.json"),
        (["text.txt"], 2, "text.txt is a file of another kind"),
        (["empty", "--revision", "v1"], 2, "--revision v1 names a state of a repository, and empty is a local path"),
        (["empty", "--import", "no_such_module"], 2, "no_such_module"),
        ([], 2, "Missing argument"),
    ],
)
def test_what_cannot_be_imported_gets_one_short_message(telamon, here, words, code, message):
    (here / "empty").mkdir()
    (here / "text.txt").write_text("x")
    answer = telamon("import", *words)
    assert answer.code == code and message in answer.err and "Traceback" not in answer.err
    assert not (here / "runs").exists()
