"""A run knows the tokenizer and the chat template of its weights, and goes on with no other unless it is told to."""

import io
import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from telamon.config.load import load_run, to_yaml
from telamon.data.chat_template import find_template
from telamon.data.tokenizer import load_tokenizer
from telamon.errors import ConfigError, DataError
from telamon.hub.exporting import generation_beside
from telamon.hub.tokenizer_files import write_tokenizer
from telamon.infer.run import TOKENIZER, ends_of_text
from telamon.infer.text_record import TextRecord
from telamon.train.run_dir import RunDirectory
from telamon.train.start import open_data

CHAT = Path(__file__).parent.parent / "reference" / "chat"
TEMPLATES = {name: CHAT / "templates" / f"{name}.jinja" for name in ("chatml", "chatml-tools")}


@pytest.fixture
def start(tmp_path):
    """A function that opens the data of a run of a name, with a tokenizer folder and further overrides."""
    (tmp_path / "text").mkdir()
    for number in range(4):
        (tmp_path / "text" / f"{number}.txt").write_text("the cat sat on the mat " * (3 + number))
    shutil.copytree(CHAT / "tokenizers" / "chatml", tmp_path / "tokenizer")

    def call(name: str, *overrides: str, allow_mismatch: bool = False) -> TextRecord:
        given = [
            f'data.sources=[{{kind: text, path: "{tmp_path}/text"}}]',
            f"data.cache_dir={tmp_path}/cache",
            "model.preset=tiny-llama",
            "train.seq_len=16",
        ]
        mine = (
            []
            if any("tokenizer.path" in word or "init_from" in word for word in overrides)
            else [f"data.tokenizer.path={tmp_path}/tokenizer"]
        )
        config = load_run(None, [*given, *mine, *overrides]).config
        run = tmp_path / name
        run.mkdir(exist_ok=True)
        open_data(config, RunDirectory(str(run)), Console(file=io.StringIO()), allow_mismatch=allow_mismatch)
        (run / "config.yaml").write_text(to_yaml(config))  # as `telamon train` does
        record = TextRecord.read(str(run))
        assert record is not None
        return record

    return call


def swapped(folder: Path) -> None:
    """Another tokenizer of the same size: two letters change places."""
    file = folder / "tokenizer.json"
    layout = json.loads(file.read_text())
    vocab = layout["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(layout))


def test_a_run_goes_on_with_its_own_template_only(start, tmp_path):
    first = start("run", f"data.tokenizer.chat_template={TEMPLATES['chatml']}")
    kept = (tmp_path / "run" / TOKENIZER / "chat_template.jinja").read_bytes()
    assert kept == TEMPLATES["chatml"].read_bytes()
    other = f"data.tokenizer.chat_template={TEMPLATES['chatml-tools']}"
    with pytest.raises(
        ConfigError, match=rf"run was trained with another chat template: its hash is {first.chat_template}.*--allow-mismatch"
    ) as caught:
        start("run", other)
    assert (tmp_path / "run" / TOKENIZER / "chat_template.jinja").read_bytes() == kept
    changed = start("run", other, allow_mismatch=True)
    assert changed.tokenizer == first.tokenizer and str(changed.chat_template) in str(caught.value)
    assert (tmp_path / "run" / TOKENIZER / "chat_template.jinja").read_bytes() == TEMPLATES["chatml-tools"].read_bytes()


def test_a_run_goes_on_with_its_own_tokenizer_only(start, tmp_path):
    first = start("run")
    kept = (tmp_path / "run" / TOKENIZER / "tokenizer.json").read_text()
    swapped(tmp_path / "tokenizer")
    other = load_tokenizer(str(tmp_path / "tokenizer")).hash
    with pytest.raises(ConfigError, match=f"another tokenizer: its hash is {first.tokenizer}, and that of the one in use {other}"):
        start("run")
    assert (tmp_path / "run" / TOKENIZER / "tokenizer.json").read_text() == kept


def test_weights_of_another_run_are_taken_with_their_tokenizer_and_template(start, tmp_path):
    """A new run that begins with them has both by itself, and no others."""
    first = start("run", f"data.tokenizer.chat_template={TEMPLATES['chatml']}")
    begun = f"train.init_from={tmp_path}/run"
    assert start("second", begun) == first
    with pytest.raises(ConfigError, match="another chat template"):
        start("third", begun, f"data.tokenizer.chat_template={TEMPLATES['chatml-tools']}")
    swapped(tmp_path / "tokenizer")
    other = f"data.tokenizer.path={tmp_path}/tokenizer"
    with pytest.raises(ConfigError, match="another tokenizer"):
        start("third", begun, other)
    third = start("third", begun, other, allow_mismatch=True)
    assert third.tokenizer != first.tokenizer
    assert start("third", begun, other) == third  # it is its own from then on


def test_what_ends_a_turn_stays_true_of_what_is_trained_from_an_import(start, tmp_path):
    """Several end tokens of a generation config beside the tokenizer: for the run, for one begun with it, and for their exports."""
    (tmp_path / "tokenizer" / "generation_config.json").write_text('{"eos_token_id": [2, 7], "temperature": 0.6}')
    start("run")
    start("second", f"train.init_from={tmp_path}/run")
    for name in ("run", "second"):
        folder = tmp_path / name / TOKENIZER
        assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [2, 7], "temperature": 0.6}
        assert {2, 7} <= ends_of_text(str(tmp_path / name), load_tokenizer(str(folder)))
        assert generation_beside(folder)["eos_token_id"] == [2, 7]


def test_a_template_beside_the_tokenizer_goes_with_the_run_and_its_export(start, tmp_path):
    shutil.copyfile(TEMPLATES["chatml"], tmp_path / "tokenizer" / "chat_template.jinja")
    record = start("run")
    (tmp_path / "export").mkdir()
    write_tokenizer(tmp_path / "run" / TOKENIZER, tmp_path / "export", longest=16)
    exported = find_template(tmp_path / "export")
    assert exported is not None and exported.hash == record.chat_template
    # The export's tokenizer adds BOS to plain texts; its ids are the same.
    tokenizer = load_tokenizer(str(tmp_path / "export"))
    assert tokenizer.encode("the cat") == load_tokenizer(str(tmp_path / "run" / TOKENIZER)).encode("the cat")


def test_a_damaged_record_is_an_error(tmp_path):
    (tmp_path / "text.json").write_text('{"tokeniser": 1}')
    with pytest.raises(DataError, match=r"text\.json is damaged"):
        TextRecord.read(str(tmp_path))
