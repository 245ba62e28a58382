import gzip
import io
import json
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from telamon.config.schema import SourceConfig
from telamon.data.sources import PIECE, cut, open_source
from telamon.errors import DataError


def documents(kind: str, path: object, chosen: np.ndarray | None = None, **more) -> list[str]:
    source = open_source(SourceConfig.model_validate({"kind": kind, "path": str(path), **more}))
    texts: dict[int, str] = {}
    for index, piece in source.read(chosen):
        texts[index] = texts.get(index, "") + piece
    return list(texts.values())


def parquet_bytes(texts: list[str | None], name: str = "text") -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({name: texts, "label": list(range(len(texts)))}), out)
    return out.getvalue()


def test_a_folder_gives_its_files_in_the_order_of_their_paths(tmp_path: Path):
    for name in ("b/2.txt", "a.txt", "b/1.txt", ".hidden/x.txt", "b/.swp"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert documents("text", tmp_path) == ["a.txt", "b/1.txt", "b/2.txt"]
    assert documents("text", tmp_path / "b" / "*.txt") == ["b/1.txt", "b/2.txt"]
    assert documents("text", tmp_path / "**" / "1.txt") == ["b/1.txt"]
    assert documents("text", tmp_path / "a.txt") == ["a.txt"]


def test_the_content_hash_is_of_relative_paths_and_content(tmp_path: Path):
    def digest(folder: str, **files: str) -> str:
        (tmp_path / folder).mkdir()
        for name, text in files.items():
            (tmp_path / folder / name).write_text(text)
        return open_source(SourceConfig(kind="text", path=str(tmp_path / folder))).inventory.sha256

    one = digest("one", a="x", b="y")
    assert digest("two", b="y", a="x") == one
    assert len({one, digest("three", a="y", b="x"), digest("four", a="xy", b=""), digest("five", a="x", c="y")}) == 4


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_files_behind_a_url_are_the_same_documents(tmp_path: Path, kind: str):
    texts = ["first\n", "zweites ß", "三"]
    files = {
        "text": {f"{i}.txt": text.encode() for i, text in enumerate(texts)},
        "jsonl": {"rows.jsonl": "".join(json.dumps({"text": t}) + "\n" for t in texts).encode()},
        "parquet": {"rows.parquet": parquet_bytes([*texts])},
    }[kind]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        with fsspec.open(f"memory://{kind}/{name}", "wb") as out:
            out.write(content)  # pyright: ignore[reportAttributeAccessIssue]
    assert documents(kind, tmp_path) == documents(kind, f"memory://{kind}") == texts
    local, remote = (open_source(SourceConfig.model_validate({"kind": kind, "path": p})) for p in (str(tmp_path), f"memory://{kind}"))
    assert local.inventory.sha256 == remote.inventory.sha256
    assert local.inventory.keys.tolist() == remote.inventory.keys.tolist()


def test_chosen_documents_alone_are_read(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n\n{"text": "b"}\nnever parsed\n')
    (tmp_path / "rows.parquet").write_bytes(parquet_bytes(["a", None, "c"]))
    assert documents("jsonl", tmp_path / "rows.jsonl", np.array([False, True, False])) == ["b"]
    assert documents("parquet", tmp_path / "rows.parquet", np.array([True, False, True])) == ["a", "c"]
    assert documents("parquet", tmp_path / "rows.parquet") == ["a", "", "c"]


def test_compressed_files_are_read_by_their_suffix(tmp_path: Path):
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(b'{"body": "a"}\n{"body": "b"}\n'))
    assert documents("jsonl", tmp_path, field="body") == ["a", "b"]


def test_a_long_document_comes_in_pieces_cut_between_words():
    text = "word and\n" * (PIECE // 4)
    pieces = list(cut([text[: PIECE // 3], text[PIECE // 3 :]]))
    assert "".join(pieces) == text and max(map(len, pieces)) <= PIECE
    assert all(after.startswith(" and") for after in pieces[1:])
    blob = "x" * (2 * PIECE + 5)
    assert [len(piece) for piece in cut([blob])] == [PIECE, PIECE, 5]
    assert list(cut([""])) == [""]


def test_a_character_across_two_blocks_is_one_character(tmp_path: Path):
    text = "a" * (PIECE - 1) + "數" * PIECE
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    assert documents("text", tmp_path / "a.txt") == [text]


def test_python_files_are_read_as_python_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nname = '\xe9'\n")
    (tmp_path / "mark.py").write_bytes(b"\xef\xbb\xbfx = 1\r\n")
    (tmp_path / "broken.py").write_bytes(b"x = '\xe9'\n")
    (tmp_path / "cookie.py").write_bytes(b"# coding: no-such-codec\n")
    for left_out in ("site-packages", "lib/dist-packages"):
        (tmp_path / left_out).mkdir(parents=True)
        (tmp_path / left_out / "installed.py").write_text("y = 2\n")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    source = open_source(SourceConfig())
    assert [text for _, text in source.read()] == ["# -*- coding: latin-1 -*-\nname = 'é'\n", "x = 1\r\n"]
    assert source.inventory.skipped == ("broken.py", "cookie.py")


def test_the_default_is_the_standard_library():
    source = open_source(SourceConfig())
    facts = source.inventory
    assert facts.files > 500 and facts.bytes > 8_000_000
    assert not any("-packages" in fact.file.key for fact in source._facts)  # pyright: ignore[reportAttributeAccessIssue]


BAD = {
    "missing path": ("text", None, r"bad: no such file or folder"),
    "empty folder": ("text", {}, r"bad: no file is in this folder; point data.sources' path"),
    "folder without parquet": ("parquet", {"a.txt": b"x"}, r"bad: no file with the suffix .parquet is in this folder"),
    "not UTF-8": ("text", {"a.txt": b"fine", "b.txt": b"abc\xff\xfe"}, r"b.txt: not UTF-8 at byte 3 \(0xff\); convert it"),
    "half a character at the end": ("text", {"a.txt": "né".encode()[:-1]}, r"a.txt: not UTF-8 at byte 1 \(0xc3\)"),
    "not JSON": ("jsonl", {"a.jsonl": b'{"text": "a"}\n\n{"text": oops}\n'}, r"a.jsonl:3: not JSON: Expecting value at column 10"),
    "JSON line not UTF-8": ("jsonl", {"a.jsonl": b'{"text": "\xff"}\n'}, r"a.jsonl:1: not UTF-8 at byte 10 of the line"),
    "not an object": ("jsonl", {"a.jsonl": b"[1]\n"}, r"a.jsonl:1: a JSON list; every line must be an object"),
    "missing field": ("jsonl", {"a.jsonl": b'{"body": 1, "id": 2}\n'}, r"a.jsonl:1: no field 'text'; fields there: 'body', 'id'"),
    "field not text": ("jsonl", {"a.jsonl": b'{"text": 1}\n'}, r"a.jsonl:1: the field 'text' holds 1; it must hold text"),
    "corrupt Parquet": ("parquet", {"a.parquet": b"PAR1 nonsense PAR1"}, r"a.parquet: not a valid Parquet file"),
    "cut Parquet": ("parquet", {"a.parquet": parquet_bytes(["x" * 100] * 100)[:-20]}, r"a.parquet: not a valid Parquet file"),
    "missing column": (
        "parquet",
        {"a.parquet": parquet_bytes(["x"], "body")},
        r"a.parquet: no column 'text'; columns there: 'body', 'label'",
    ),
    "corrupt gzip": ("jsonl", {"a.jsonl.gz": b"\x1f\x8b nonsense"}, r"a.jsonl.gz: cannot be read"),
}


@pytest.mark.parametrize(("kind", "files", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_an_error_that_names_the_file(tmp_path: Path, kind: str, files: dict[str, bytes] | None, message: str):
    folder = tmp_path / "bad"
    if files is not None:
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        documents(kind, folder)


def test_damage_inside_a_parquet_page_names_the_file(tmp_path: Path):
    rng = np.random.default_rng(0)
    content = bytearray(parquet_bytes(["".join(map(chr, rng.integers(97, 122, 200))) for _ in range(500)]))
    content[100:4000] = bytes(3900)
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(DataError, match=r"a.parquet: not a valid Parquet file"):
        documents("parquet", tmp_path / "a.parquet")


def test_a_column_of_numbers_is_refused(tmp_path: Path):
    (tmp_path / "a.parquet").write_bytes(parquet_bytes(["x"]))
    with pytest.raises(DataError, match=r"the column 'label' holds int64; it must hold strings"):
        documents("parquet", tmp_path / "a.parquet", field="label")
