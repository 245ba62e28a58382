"""`telamon records`."""

from telamon.records.record import read_records
from telamon.records.table import render


def test_the_table_is_written_from_the_records(telamon, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert telamon("verify", "qwen3-8b", "--checks", "parameter-count").code == 0
    answer = telamon("records", "table")
    assert (answer.code, answer.out.strip()) == (0, "docs/support.md: 1 record")
    page = (tmp_path / "docs/support.md").read_text()
    assert page == render(read_records(tmp_path / "docs/records"))
    assert "[yes (0)](records/qwen3-8b.parameter-count.json)" in page

    named = telamon("records", "table", "--folder", "docs/records", "--page", "other/page.md")
    assert named.code == 0 and (tmp_path / "other/page.md").read_text() == page


def test_a_folder_without_records_makes_no_table(telamon, tmp_path):
    answer = telamon("records", "table", "--folder", str(tmp_path), "--page", str(tmp_path / "page.md"))
    assert answer.code == 2 and f"no records in {tmp_path}" in answer.err
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_record_is_named(telamon, tmp_path):
    (tmp_path / "odd.json").write_text("{}")
    answer = telamon("records", "table", "--folder", str(tmp_path), "--page", str(tmp_path / "page.md"))
    assert answer.code == 2 and f"{tmp_path / 'odd.json'} is not a record" in answer.err and "Traceback" not in answer.err
