"""Small files, and what is said of a place before they are made."""

from pathlib import Path

import pytest

from telamon.errors import ConfigError
from telamon.watch.files import check_place


@pytest.mark.parametrize("url", ["gs://bucket/step", "s3://bucket/step", Path("gs://bucket/step")], ids=repr)
def test_a_url_is_no_place_for_a_local_file(url: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Else it became a folder `gs:` where the command was run."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"--save (gs|s3):/.* is no local file"):
        check_place(url, "--save")


def test_a_place_below_folders_that_are_missing_is_taken(tmp_path: Path):
    check_place(tmp_path / "new" / "step", "--save")
