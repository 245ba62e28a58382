"""Exports hold what transformers and vLLM read, bit by bit what the checkpoint holds, and are whole or not there."""

import io
import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from checkpoint_folders import llama_config, llama_tensors, read_folder, write_folder
from rich.console import Console

from telamon.checkpoint.streamed import StreamedReader
from telamon.config import registry
from telamon.config.load import load_run
from telamon.data.tokenizer import load_tokenizer, train_bpe
from telamon.errors import CheckpointError, ConfigError
from telamon.hub.exporting import export_run, parse_size
from telamon.hub.importing import import_from
from telamon.hub.opening import open_source
from telamon.infer.run import TOKENIZER
from telamon.models.llama import LlamaConfig
from telamon.models.weights import Model
from telamon.train.run_dir import create_run

BF16 = ml_dtypes.bfloat16
TEXT = "def main(argument):\n    return argument\n\nclass Thing:\n    pass\n"
VOCABULARY = 293


@pytest.fixture
def screen():
    return Console(file=io.StringIO(), width=300)


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """A run imported from shards, and the folder it came from."""
    folder = tmp_path_factory.mktemp("imported")
    config = llama_config(torch_dtype="bfloat16", pad_token_id=0, rope_scaling={"rope_type": "linear", "factor": 2.0})
    source = write_folder(folder / "source", llama_tensors(BF16), config, shards=3)
    (source / "tokenizer.json").write_text('{"a": 1}')
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "Own"}')
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (source / "generation_config.json").write_text('{"eos_token_id": [2, 7], "temperature": 0.6}')
    import_from(str(source), folder / "run", console=Console(file=io.StringIO()))
    return folder / "run", source


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run as training leaves it: a vocabulary of 320 rows for a tokenizer of 293, float32 weights, other state beside them."""
    folder = tmp_path_factory.mktemp("trained")
    overrides = ["model.preset=tiny-llama", "model.vocab_size=320", "train.seq_len=64", "run.name=night", f"run.root={folder}"]
    config = load_run(overrides=overrides).config
    run = create_run(config)
    tokenizer = train_bpe([TEXT] * 4, vocab_size=300)
    assert tokenizer.vocab_size == VOCABULARY  # all that there was to learn
    tokenizer.export(folder / "night" / TOKENIZER)
    (folder / "night" / TOKENIZER / "chat_template.jinja").write_text("{{ bos_token }}{{ messages }}")
    with run.store(config) as store:
        for step in (3, 6):
            weights = jax.jit(Model(config.model.spec()).init)(jax.random.key(step))
            store.save(step, {"weights": weights, "other": jax.numpy.zeros(3)}, {})
    return folder / "night", weights


def settings(folder, name="config.json"):
    return json.loads((folder / name).read_text())


# An import goes back


def test_an_import_goes_back_bit_by_bit(imported, tmp_path, screen):
    run, source = imported
    export_run(str(run), tmp_path / "out", console=screen)
    ours, theirs = read_folder(tmp_path / "out"), read_folder(source)
    assert set(ours) == set(theirs)
    assert all(ours[name].dtype == theirs[name].dtype and ours[name].tobytes() == theirs[name].tobytes() for name in theirs)


def test_the_config_says_what_the_sources_said(imported, tmp_path, screen):
    run, source = imported
    export_run(str(run), tmp_path / "out", console=screen)
    before, after = settings(source), settings(tmp_path / "out")
    assert {name: after[name] for name in before} == before
    for name in ("generation_config.json", "tokenizer_config.json"):
        assert settings(source, name) == settings(tmp_path / "out", name)
    for name in ("tokenizer.json", "chat_template.jinja", "additional_chat_templates/tools.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()


def test_another_type_can_be_asked_for(imported, tmp_path, screen):
    run, source = imported
    export_run(str(run), tmp_path / "out", console=screen, dtype="float32")
    ours, theirs = read_folder(tmp_path / "out"), read_folder(source)
    assert all(ours[name].dtype == np.float32 and np.array_equal(ours[name], theirs[name].astype(np.float32)) for name in theirs)
    assert settings(tmp_path / "out")["torch_dtype"] == "float32"


# Files


def test_shards_are_filled_in_order_and_indexed(imported, tmp_path, screen):
    limit = 20_000
    export_run(str(imported[0]), tmp_path / "out", console=screen, shard_bytes=limit)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert [file.name for file in files] == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    index = settings(tmp_path / "out", "model.safetensors.index.json")
    tensors = read_folder(tmp_path / "out")
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in tensors.values()) == 43_328
    assert set(index["weight_map"]) == set(tensors)
    held = {file.name: sum(tensors[name].nbytes for name, holder in index["weight_map"].items() if holder == file.name) for file in files}
    assert max(held.values()) <= limit and sum(held.values()) == 43_328
    with open_source(str(tmp_path / "out")) as source:  # the index fits its shards
        assert set(source.tensors) == set(tensors)


def test_a_tensor_larger_than_a_shard_has_one_of_its_own(imported, tmp_path, screen):
    export_run(str(imported[0]), tmp_path / "out", console=screen, shard_bytes=1)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == len(llama_tensors())


def test_one_file_needs_no_index(imported, tmp_path, screen):
    export_run(str(imported[0]), tmp_path / "out", console=screen)
    assert [file.name for file in (tmp_path / "out").glob("model*")] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5_000_000_000), ("500 MB", 500_000_000), ("1.5kb", 1500), ("123", 123), ("5 gb ", 5_000_000_000)]
)
def test_sizes_are_read_as_they_are_written_elsewhere(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "much", "0GB", "-1GB", "5 GiB", "1..5MB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match="is not a size; write it as 5GB or 500MB"):
        parse_size(text)


# A trained run


def test_a_trained_run_exports_its_newest_weights_without_rows_that_no_token_stands_for(trained, tmp_path, screen):
    run, weights = trained
    export_run(str(run), tmp_path / "out", console=screen)
    tensors = read_folder(tmp_path / "out")
    assert "night, step 6" in screen.file.getvalue()
    assert {array.dtype for array in tensors.values()} == {np.dtype(np.float32)}
    table = tensors["model.embed_tokens.weight"]
    assert table.shape[0] == settings(tmp_path / "out")["vocab_size"] == VOCABULARY
    assert np.array_equal(table, weights["embedding"][:VOCABULARY])
    assert "lm_head.weight" not in tensors and settings(tmp_path / "out")["tie_word_embeddings"] is True


def test_what_was_trained_from_other_weights_keeps_their_rows_and_their_length(trained, tmp_path, screen):
    """Published models have more rows than their tokenizers know, and read longer texts than they are tuned on."""
    begun = [f"train.init_from={trained[0]}", "model.max_positions=4096", "train.seq_len=16", "run.name=second", f"run.root={tmp_path}"]
    config = load_run(overrides=begun).config
    run = create_run(config)
    load_tokenizer(str(trained[0] / TOKENIZER)).export(tmp_path / "second" / TOKENIZER)
    with run.store(config) as store:
        store.save(1, {"weights": trained[1]}, {})
    export_run(str(tmp_path / "second"), tmp_path / "out", console=screen)
    table = read_folder(tmp_path / "out")["model.embed_tokens.weight"]
    assert np.array_equal(table, trained[1]["embedding"]) and len(table) == settings(tmp_path / "out")["vocab_size"] == 320
    assert settings(tmp_path / "out")["max_position_embeddings"] == 4096
    assert settings(tmp_path / "out", "tokenizer_config.json")["model_max_length"] == 4096


def test_bfloat16_is_the_nearest_to_what_was_trained(trained, tmp_path, screen):
    run, weights = trained
    export_run(str(run), tmp_path / "out", console=screen, dtype="bfloat16")
    table = read_folder(tmp_path / "out")["model.embed_tokens.weight"]
    assert table.dtype == BF16 and settings(tmp_path / "out")["torch_dtype"] == "bfloat16"
    assert np.array_equal(table, np.asarray(jax.numpy.asarray(weights["embedding"], jax.numpy.bfloat16))[:VOCABULARY])


def test_a_trained_run_says_how_its_text_begins_and_ends(trained, tmp_path, screen):
    run, _ = trained
    export_run(str(run), tmp_path / "out", console=screen)
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    assert {name: settings(tmp_path / "out")[name] for name in ids} == ids
    assert settings(tmp_path / "out", "generation_config.json") == ids
    assert settings(tmp_path / "out")["max_position_embeddings"] == 64
    config = settings(tmp_path / "out", "tokenizer_config.json")
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast" and config["model_max_length"] == 64
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == ("<|bos|>", "<|eos|>", "<|pad|>")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ bos_token }}{{ messages }}"
    ours = tokenizers.Tokenizer.from_file(str(run / TOKENIZER / "tokenizer.json"))
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert theirs.encode(TEXT).ids == [0, *ours.encode(TEXT, add_special_tokens=False).ids]


def test_an_export_of_a_trained_run_comes_back_as_it_was(trained, tmp_path, screen):
    run, _ = trained
    export_run(str(run), tmp_path / "out", console=screen)
    import_from(str(tmp_path / "out"), tmp_path / "again", console=screen)
    export_run(str(tmp_path / "again"), tmp_path / "twice", console=screen)
    assert sorted(p.name for p in (tmp_path / "twice").iterdir()) == sorted(p.name for p in (tmp_path / "out").iterdir())
    for file in sorted((tmp_path / "out").iterdir()):
        assert (tmp_path / "twice" / file.name).read_bytes() == file.read_bytes(), file.name


def test_padded_rows_never_leave(tmp_path, screen):
    """A vocabulary of 11 that is stored in 16 rows, head tied: 11 rows come out."""
    tensors = {name: array for name, array in llama_tensors(vocabulary=11).items() if name != "lm_head.weight"}
    source = write_folder(tmp_path / "source", tensors, llama_config(vocab_size=11, tie_word_embeddings=True))
    import_from(str(source), tmp_path / "run", console=screen)
    config = load_run(str(tmp_path / "run")).config
    padded = config.model.model_copy(update={"vocab_multiple": 16})
    overrides = [f"run.root={tmp_path}", "run.name=padded"]
    run_config = load_run(str(tmp_path / "run"), [*overrides, "model.vocab_multiple=16"]).config
    run = create_run(run_config)
    weights = jax.jit(Model(padded.spec()).init)(jax.random.key(0))
    assert weights["embedding"].shape[0] == 16
    with run.store(run_config) as store:
        store.save(1, {"weights": weights}, {})
    export_run(str(tmp_path / "padded"), tmp_path / "out", console=screen)
    table = read_folder(tmp_path / "out")["model.embed_tokens.weight"]
    assert table.shape == (11, 32) and settings(tmp_path / "out")["vocab_size"] == 11
    assert np.array_equal(table, weights["embedding"][:11])


# What cannot be exported


def test_a_run_without_a_checkpoint_says_so(tmp_path, screen):
    create_run(load_run(overrides=["run.name=young", f"run.root={tmp_path}"]).config)
    with pytest.raises(CheckpointError, match="holds no whole checkpoint yet"):
        export_run(str(tmp_path / "young"), tmp_path / "out", console=screen)
    assert not (tmp_path / "out").exists()


def test_a_family_without_a_form_of_its_own_is_refused(trained, tmp_path, screen, monkeypatch):
    """Derived from Llama and other than it: written as a Llama, it would be read as one and compute something else."""

    class Twisted(LlamaConfig):
        family: str = "twisted"

    registry.families()
    monkeypatch.setattr(registry, "_families", {**registry._families, "twisted": Twisted})
    shutil.copytree(trained[0], tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("family: llama", "family: twisted"))
    with pytest.raises(ConfigError, match="the family 'twisted' has no Hugging Face form of its own"):
        export_run(str(tmp_path / "run"), tmp_path / "out", console=screen)


def test_a_damaged_checkpoint_is_passed_over(trained, tmp_path, screen, caplog):
    shutil.copytree(trained[0], tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step_00000006" / "manifest.json").write_text("x")
    export_run(str(tmp_path / "run"), tmp_path / "out", console=screen)
    assert "run, step 3" in screen.file.getvalue() and "skipping the damaged checkpoint" in caplog.text


def test_what_is_in_the_way_is_kept(imported, tmp_path, screen):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "letters.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match="choose another name"):
            export_run(str(imported[0]), tmp_path / "out", console=screen, overwrite=overwrite)
    assert (tmp_path / "out" / "letters.txt").read_text() == "mine"


def test_an_export_that_ends_half_way_leaves_nothing(imported, tmp_path, screen, monkeypatch):
    read, calls = StreamedReader.read, []

    def failing(reader, path, index):
        calls.append(path)
        if len(calls) == 10:
            raise KeyboardInterrupt
        return read(reader, path, index)

    monkeypatch.setattr(StreamedReader, "read", failing)
    with pytest.raises(KeyboardInterrupt):
        export_run(str(imported[0]), tmp_path / "out", console=screen)
    assert list(tmp_path.iterdir()) == []
