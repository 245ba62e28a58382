"""Models come in whole or not at all: what is stored, what is refused and in which words, and what interruptions leave."""

import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time

import jax
import ml_dtypes
import numpy as np
import pytest
from checkpoint_folders import llama_config, llama_tensors, read_folder, write_folder
from rich.console import Console

from telamon.checkpoint.streamed import StreamedReader
from telamon.config.load import load_run
from telamon.data.tokenizer import train_bpe
from telamon.errors import CheckpointError, ConfigError, DataError
from telamon.hub import importing, whole_folder
from telamon.hub.exporting import export_run
from telamon.hub.importing import import_model
from telamon.hub.opening import open_source
from telamon.hub.record import token_ids
from telamon.hub.safetensors_folder import SafetensorsFolder
from telamon.infer.run import ends_of_text
from telamon.infer.text_record import TextRecord

BF16 = ml_dtypes.bfloat16
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def screen():
    return Console(file=io.StringIO(), width=300)


def printed(screen):
    return screen.file.getvalue()


@pytest.fixture
def bring(tmp_path, screen):
    """Imports tensors as `tmp_path/runs/run`."""

    def bring(tensors, config=None, *, files=(), **more):
        folder = write_folder(tmp_path / "source", tensors, config or llama_config())
        for name, content in dict(files).items():
            (folder / name).write_text(content)
        with open_source(str(folder)) as source:
            import_model(source, tmp_path / "runs" / "run", console=screen, **more)
        return tmp_path / "runs" / "run"

    return bring


def test_the_tokenizer_and_template_that_the_weights_know_are_recorded(bring):
    tokenizer = train_bpe(["the cat sat on the mat"], vocab_size=280)
    run = bring(llama_tensors(), files={"tokenizer.json": tokenizer.to_json(), "chat_template.jinja": "{{ messages }}"})
    assert TextRecord.read(str(run)) == TextRecord(tokenizer.hash, hashlib.sha256(b"{{ messages }}").hexdigest())


@pytest.mark.parametrize(
    ("within", "around"), [({}, {"eos_token_id": [2, 7]}), ({"eos_token_id": [2, 7]}, {}), ({"eos_token_id": 1}, {"eos_token_id": [2, 7]})]
)
def test_tokens_that_end_a_text_are_taken_from_the_config_where_no_generation_config_names_them(within, around):
    assert token_ids({"vocab_size": 8, **around, "text_config": within}) == {"eos_token_id": [2, 7]}


def test_a_model_without_a_generation_config_ends_where_its_config_says(bring, tmp_path, screen):
    tokenizer = train_bpe(["the cat sat on the mat"], vocab_size=280)
    run = bring(
        llama_tensors(), llama_config() | {"eos_token_id": [2, 7], "pad_token_id": 3}, files={"tokenizer.json": tokenizer.to_json()}
    )
    assert ends_of_text(str(run), tokenizer) == {1, 2, 7}
    export_run(str(run), tmp_path / "export", console=screen)
    assert json.loads((tmp_path / "export" / "config.json").read_text())["eos_token_id"] == [2, 7]


@pytest.mark.parametrize("content", ['{"eos_token_id": "</s>"}', '{"eos_token_id": [2, {}]}', '{"eos_token_id": 2.5}', "[2]", "{2"])
def test_what_does_not_say_where_a_text_ends_is_named(tmp_path, content):
    tokenizer = train_bpe(["the cat sat on the mat"], vocab_size=280)
    file = tmp_path / "tokenizer" / "generation_config.json"
    file.parent.mkdir()
    file.write_text('{"eos_token_id": [2, -1, 99999999999]}')
    assert ends_of_text(str(tmp_path), tokenizer) == {1, 2}, "an id that no token has ends nothing"
    file.write_text(content)
    with pytest.raises(DataError, match=re.escape(str(file))):
        ends_of_text(str(tmp_path), tokenizer)


def back(run, tmp_path, screen, **more):
    """The tensors of an export of `run`."""
    export_run(str(run), tmp_path / "export", console=screen, **more)
    return read_folder(tmp_path / "export")


def assert_bit_equal(left, right):
    assert set(left) == set(right)
    for name in left:
        assert left[name].dtype == right[name].dtype and left[name].shape == right[name].shape, name
        assert left[name].tobytes() == right[name].tobytes(), name


# What is written


def test_a_run_holds_all_that_was_known_of_the_model(bring):
    files = {
        "tokenizer.json": "{}",
        "chat_template.jinja": "{{ x }}",
        "generation_config.json": '{"eos_token_id": [2, 7]}',
        "README.md": "no",
    }
    run = bring(llama_tensors(), files=files)
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "config.yaml", "hf.json", "tokenizer"]
    assert sorted(path.name for path in (run / "tokenizer").iterdir()) == [
        "chat_template.jinja",
        "generation_config.json",
        "tokenizer.json",
    ]
    record = json.loads((run / "hf.json").read_text())
    assert record["origin"].endswith("/source") and record["config"] == llama_config()
    assert record["generation_config"] == {"eos_token_id": [2, 7]}
    config = load_run(str(run)).config
    assert (config.model.family, config.model.d_model, config.model.n_layers, config.model.vocab_size) == ("llama", 32, 2, 96)
    assert config.train.seq_len == 128 and config.train.compute_dtype == "float32"


def test_a_tokenizer_that_cannot_be_used_is_said_with_its_place_in_the_run(bring, screen):
    run = bring(llama_tensors(), files={"tokenizer.json": "{"})
    assert f"the tokenizer cannot be used as it is: data.tokenizer.path={run}/tokenizer/tokenizer.json: not a tokenizer" in printed(screen)


def test_a_damaged_generation_config_is_said_before_the_weights_are_copied(bring, screen):
    with pytest.raises(DataError, match=r"generation_config.json is not valid JSON"):
        bring(llama_tensors(), files={"generation_config.json": "{"})
    assert printed(screen) == ""


def test_weights_are_stored_in_the_type_they_came_in_and_computed_in(bring):
    run = bring(llama_tensors(BF16), llama_config(torch_dtype="bfloat16"))
    assert {info.dtype for info in StreamedReader(run / "checkpoints").arrays.values()} == {"bfloat16"}
    assert load_run(str(run)).config.train.compute_dtype == "bfloat16"


def test_layers_of_several_types_are_stored_in_one_that_holds_them_and_go_back_as_they_came(bring, tmp_path, screen):
    """Query maps float32 and bfloat16; key maps float16 and bfloat16, which only float32 holds both of; the rest bfloat16."""
    tensors = llama_tensors(BF16)
    for name, kind in {"layers.0.self_attn.q_proj": np.float32, "layers.1.self_attn.k_proj": np.float16}.items():
        tensors[f"model.{name}.weight"] = tensors[f"model.{name}.weight"].astype(kind) * kind(1.001)
    run = bring(tensors)
    stored = {path.rpartition(".")[2]: info.dtype for path, info in StreamedReader(run / "checkpoints").arrays.items()}
    assert (stored["query"], stored["key"], stored["value"]) == ("float32", "float32", "bfloat16")
    assert_bit_equal(back(run, tmp_path, screen), tensors)


def test_what_it_will_need_is_said_first_and_what_it_took_last(bring, screen):
    bring(llama_tensors())
    lines = printed(screen).splitlines()
    largest = 96 * 32 * 4 / 1000
    assert "21,664" in printed(screen)
    memory = next(i for i, line in enumerate(lines) if line.startswith(f"memory: at most {3 * largest:.1f} kB beyond the process's own"))
    assert lines[-1].startswith("import: 86.7 kB in ") and lines[-1].endswith("GB/s") and memory < len(lines) - 1


def test_old_buffers_are_left_out_and_said(bring, screen, tmp_path):
    tensors = llama_tensors()
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    run = bring(tensors | buffer)
    assert "1 tensors that the text model does not need are left out, such as model.layers.0.self_attn.rotary_emb.inv_freq" in printed(
        screen
    )
    assert_bit_equal(back(run, tmp_path, screen), tensors)


# Tied heads


def test_a_stored_head_that_equals_the_table_it_is_tied_to_goes_back_as_it_came(bring, tmp_path, screen):
    tensors = llama_tensors(BF16)
    tensors[HEAD] = tensors[TABLE].copy()
    run = bring(tensors, llama_config(tie_word_embeddings=True))
    assert not [path for path in StreamedReader(run / "checkpoints").arrays if path.startswith("head")]
    assert_bit_equal(back(run, tmp_path, screen), tensors)


@pytest.mark.parametrize("change", ["value", "dtype", "rows"])
def test_a_stored_head_that_differs_from_the_table_it_is_said_to_be_is_refused(bring, change):
    tensors = llama_tensors()
    tensors[HEAD] = tensors[TABLE].copy()
    if change == "value":
        tensors[HEAD][95, 31] += 1e-3
    elif change == "dtype":
        tensors[HEAD] = tensors[HEAD].astype(BF16)
    else:
        tensors[HEAD] = tensors[HEAD][:90]
    with pytest.raises(
        DataError, match=r'ties the head to model.embed_tokens.weight, and lm_head.weight differs from it.*"tie_word_embeddings": false'
    ):
        bring(tensors, llama_config(tie_word_embeddings=True))


# What does not fit


def test_all_that_does_not_fit_is_counted_and_the_first_named(bring, tmp_path):
    tensors = llama_tensors()
    tensors["model.layers.0.self_attn.query.weight"] = tensors.pop("model.layers.0.self_attn.q_proj.weight")
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].T.copy()
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((48, 32), np.float32)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int32)
    with pytest.raises(DataError) as raised:
        bring(tensors)
    message = str(raised.value)
    assert "its tensors are not those of a llama of its config.json" in message
    for part in (
        "model.layers.2.mlp.up_proj.weight (48, 32) is in the source, and the model has no place for it",
        "model.layers.0.self_attn.q_proj.weight (32, 32) is missing; the source has model.layers.0.self_attn.query.weight (32, 32)",
        "model.layers.1.mlp.up_proj.weight has shape (32, 48); by its config it has (48, 32)",
        "model.norm.weight is of type int32; weights are float32, float16, bfloat16",
    ):
        assert part in message
    assert not (tmp_path / "runs").exists()


def test_of_many_misfits_the_rest_is_counted(bring):
    with pytest.raises(DataError, match=r"is missing[\s\S]*\n  and 4 more\n"):
        bring(llama_tensors(layers=1))


def test_an_attribute_that_is_not_known_is_refused_by_name(bring):
    with pytest.raises(ConfigError, match=r"source: config.json: .*new_trick=3"):
        bring(llama_tensors(), llama_config(new_trick=3))


# Interruptions


def test_a_run_in_the_way_is_kept_unless_it_may_go(bring):
    run = bring(llama_tensors())
    with pytest.raises(ConfigError, match="run exists already; choose another name, or replace it with --overwrite"):
        bring(llama_tensors(seed=1))
    bring(llama_tensors(BF16), overwrite=True)
    assert StreamedReader(run / "checkpoints").arrays["embedding"].dtype == "bfloat16"


def fail_at(monkeypatch, number, error):
    """Reading the tensor of that number raises."""
    read, calls = SafetensorsFolder.read, []

    def failing(source, name):
        calls.append(name)
        if len(calls) == number:
            raise error
        return read(source, name)

    monkeypatch.setattr(SafetensorsFolder, "read", failing)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), DataError("the shard became shorter")], ids=repr)
def test_an_import_that_ends_half_way_leaves_nothing_and_an_earlier_run_whole(bring, tmp_path, monkeypatch, error):
    run = bring(llama_tensors())
    fail_at(monkeypatch, 10, error)
    with pytest.raises(type(error)):
        bring(llama_tensors(seed=1), overwrite=True)
    assert [path.name for path in run.parent.iterdir()] == ["run"]
    assert np.array_equal(StreamedReader(run / "checkpoints").read("embedding", ()), llama_tensors()[TABLE])


def test_a_shard_that_is_cut_short_is_refused_before_anything_is_made(bring, tmp_path):
    folder = write_folder(tmp_path / "source", llama_tensors(), llama_config(), shards=2)
    os.truncate(folder / "model-00002-of-00002.safetensors", 20_000)
    with pytest.raises(DataError, match=r"model-00002-of-00002.safetensors is cut short"):
        open_source(str(folder))


def test_a_disk_that_cannot_take_it_is_found_before_it_begins(bring, tmp_path, monkeypatch):
    monkeypatch.setattr(whole_folder.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 100_000}))
    with pytest.raises(CheckpointError, match=r"run needs 4.3 MB of disk, and 100.0 kB are free there"):
        bring(llama_tensors())
    assert not (tmp_path / "runs").exists()


def test_a_disk_that_fills_on_the_way_leaves_nothing(tmp_path):
    """The kernel refuses to make files longer than 200 kB."""
    folder = write_folder(tmp_path / "source", llama_tensors(vocabulary=8192), llama_config(vocab_size=8192))
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))"
    done = subprocess.run(
        [sys.executable, "-c", f"{limit}; {CLI}", "import", str(folder), str(tmp_path / "runs" / "run")], capture_output=True, text=True
    )
    assert done.returncode == 5 and "File too large" in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert list((tmp_path / "runs").iterdir()) == []


CLI = "from telamon.cli.main import main; main()"
SLOW = f"""
import time
from telamon.hub.record import token_ids
from telamon.hub.safetensors_folder import SafetensorsFolder
from telamon.infer.run import ends_of_text
read = SafetensorsFolder.read
def slow(source, name):
    time.sleep(0.2)
    return read(source, name)
SafetensorsFolder.read = slow
{CLI}
"""


@pytest.mark.parametrize(("number", "left"), [(signal.SIGINT, []), (signal.SIGKILL, [".run.part"])])
def test_a_signal_half_way_leaves_nothing_that_could_be_taken_for_a_run(tmp_path, bring, number, left):
    folder = write_folder(tmp_path / "source", llama_tensors(), llama_config())
    runs = tmp_path / "runs"
    process = subprocess.Popen([sys.executable, "-c", SLOW, "import", str(folder), str(runs / "run")], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(runs.glob(".run.part/checkpoints/*")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0 and "Traceback" not in errors, errors
    assert [path.name for path in runs.iterdir()] == left
    assert not list(runs.glob("*/config.yaml"))  # what makes a folder a run
    bring(llama_tensors())
    assert [path.name for path in runs.iterdir()] == ["run"]


# Memory

MEASURE = """
import io, re, sys
from pathlib import Path
from rich.console import Console
from telamon.hub.exporting import export_run
from telamon.hub.importing import import_from
folder, quiet = Path(sys.argv[1]), Console(file=io.StringIO())
def resident(key):
    return int(re.search(key + r":\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
def growth(work):
    base = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
    work()
    return resident("VmHWM") - base
def bring(name):
    import_from(str(folder / name), folder / f"{name}-run", console=quiet)
def take(name):
    export_run(str(folder / f"{name}-run"), folder / f"{name}-export", console=quiet, shard_bytes=20_000_000)
bring("small"), take("small")  # what the process needs whatever the model
print(growth(lambda: bring("large")), growth(lambda: take("large")))
"""


def test_peak_memory_is_below_three_times_the_largest_tensor_both_ways(tmp_path):
    """Eight shards, each one tensor of 16 MB: below 48 MB above what the process needs for a small model; all of them are 128 MB."""
    write_folder(tmp_path / "small", llama_tensors(), llama_config())
    width = 131_072
    large = {name: array for name, array in llama_tensors(vocabulary=width).items() if "mlp" not in name}
    for layer in range(2):
        shapes = {"gate_proj": (width, 32), "up_proj": (width, 32), "down_proj": (32, width)}
        large |= {f"model.layers.{layer}.mlp.{name}.weight": np.full(shape, layer, np.float32) for name, shape in shapes.items()}
    write_folder(tmp_path / "large", large, llama_config(vocab_size=width, intermediate_size=width), shards=len(large))
    environment = {**os.environ, "XLA_FLAGS": ""}
    done = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    importing_peak, exporting_peak = (int(text) / 1e6 for text in done.stdout.split())
    assert 16 < importing_peak < 48 and 16 < exporting_peak < 48  # below one tensor the measure itself would be wrong
    assert_bit_equal(read_folder(tmp_path / "large-export"), large)


def test_the_restored_weights_are_the_sources(bring):
    """A linear map of the file is [out, in]; ours is [in, heads, head dim]. Checked against the file itself, for the second layer."""
    tensors = llama_tensors(BF16)
    run = bring(tensors)
    query = StreamedReader(run / "checkpoints").read("stacks.0.blocks.0.mixer.query", (1,))
    assert np.array_equal(
        np.asarray(query, np.float32).reshape(32, 32).T, tensors["model.layers.1.self_attn.q_proj.weight"].astype(np.float32)
    )
    assert jax.process_count() == 1 and importing.STEP == 0
