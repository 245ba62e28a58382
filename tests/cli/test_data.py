"""`telamon data`."""

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
