"""`telamon data`."""

import re

import pytest

QUICK = ("tiny", "train.seq_len=8", "train.batch_size=2")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def test_preview_shows_token_target_mask_segment_and_position(telamon):
    answer = telamon("data", "preview", *QUICK)
    assert answer.code == 0, answer.err
    assert all(column in answer.out for column in ("token", "target", "mask", "segment", "position", "synthetic", "fill"))
    assert "step 0, row 0 of 2" in answer.out
    assert re.search(r"^held-out text: 0 bytes; data hash \w{16}$", answer.out, re.MULTILINE)


def test_another_step_and_another_row_are_others(telamon):
    tables = {
        telamon("data", "preview", *QUICK, *words).out for words in ((), ("--step", "3"), ("--row", "1"), ("--step", "3", "--row", "1"))
    }
    assert len(tables) == 4


def test_a_row_that_is_not_there_and_a_module_that_is_not_there_are_refused(telamon):
    answer = telamon("data", "preview", *QUICK, "--row", "2")
    assert answer.code == 2 and "--row 2" in answer.err and "0 to 1" in answer.err
    answer = telamon("data", "preview", *QUICK, "--import", "no_such_module")
    assert answer.code == 2 and "no_such_module" in answer.err


@pytest.fixture
def preview(telamon, tmp_path):
    """`telamon data preview` of four documents in rows of eight tokens."""
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"text": "{word}"}}\n' for word in ("[aaa]", "cat", "dog", "fly")))
    (tmp_path / "run.yml").write_text(
        f"data:\n  sources: [{{kind: jsonl, path: {tmp_path}/rows.jsonl}}]\n  cache_dir: {tmp_path}/cache\n  tokenizer: {{vocab_size: 260}}\n"
        "  shuffle: false\n  val_fraction: 0.0\ntrain: {seq_len: 8, batch_size: 4, steps: 10}\n"
    )
    return lambda *more: telamon("data", "preview", str(tmp_path / "run.yml"), *more)


def test_a_row_is_shown_token_by_token(preview):
    answer = preview("--row", "1", "--step", "0")
    assert answer.code == 0
    rows = [[cell.strip() for cell in line.strip("│ \n").split("│")] for line in answer.out.splitlines() if line.startswith("│")]
    places = {row[0]: row[1:] for row in rows if len(row) == 7}
    # "[aaa]" is six tokens (the one merge makes `aa`), the others five: row 1 begins inside `cat` and ends with `dog`.
    assert places["0"][0] == "'a'" and places["0"][2].endswith("'t'") and places["0"][3:] == ["1", "1", "0"]
    assert places["2"][0] == "<|eos|>" and places["2"][2:] == ["·", "0", "1", "2"]
    assert places["3"][0] == "<|bos|>" and places["3"][2].endswith("'d'") and places["3"][3:] == ["1", "2", "0"]
    # The last table gives the first and last id of each document: `dog` from BOS to EOS, `cat` from inside to EOS.
    documents = {row[0]: row[1:] for row in rows if len(row) == 6}
    assert documents["2"] == ["3-7", "5", "4", "0", "1"] and documents["1"][3:] == [places["0"][1], "1"]


def test_text_in_brackets_is_shown_as_it_is(preview):
    out = preview().out
    assert "'['" in out and "']'" in out and "documents" in out and "data hash" in out


def test_bad_data_exits_with_its_own_code(telamon, tmp_path):
    answer = telamon("data", "preview", 'data.sources=[{"kind": "text", "path": "nowhere"}]', f"data.cache_dir={tmp_path}")
    assert answer.code == 3 and answer.err.startswith("nowhere: no such file or folder")
