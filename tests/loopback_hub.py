"""A hub on this machine that speaks as much of the Hugging Face Hub's protocol as fetching a model needs."""

import hashlib
import json
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    revisions: dict[str, str]
    """Branch or tag -> commit."""
    commits: dict[str, dict[str, bytes]]
    """Commit -> {file name: content}."""
    gated: bool = False
    """Answer 403 to all but `TOKEN`."""


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    range: str | None


TOKEN = "hf_of_somebody_who_accepted"


@dataclass
class Hub:
    endpoint: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    cuts: dict[str, list[int]] = field(default_factory=dict)
    """File name -> for each of its next downloads, after how many bytes the connection drops."""
    broken: int | None = None
    """A status that every request gets."""
    asked: list[Asked] = field(default_factory=list)

    def add(self, name: str, folder: Path, *, revision: str = "main", gated: bool = False) -> str:
        """Make a folder's files a revision of a repository; gives the commit."""
        files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
        commit = hashlib.sha1(repr((name, revision, sorted(files))).encode()).hexdigest()
        repository = self.repositories.setdefault(name, Repository({}, {}))
        repository.revisions[revision], repository.commits[commit], repository.gated = commit, files, gated
        return commit

    def downloads(self, file: str) -> list[Asked]:
        return [asked for asked in self.asked if asked.method == "GET" and asked.path.endswith(f"/{file}")]


@contextmanager
def serving():
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(Asked(self.command, path, self.headers.get("Range")))
        try:
            self._give(path)
        except _Refused as refusal:
            self._send(refusal.status, {"X-Error-Code": refusal.code}, b"")

    def _give(self, path: str) -> None:
        match = re.fullmatch(r"(/api/models)?/([^/]+/[^/]+?)(?:/(revision|tree|resolve)/([^/]+)(?:/(.*))?)?", path)
        if match is None or self.hub.broken:
            raise _Refused(self.hub.broken or 404, "")
        api, name, verb, revision, file = match.groups()
        commit, files = self._commit(name, revision or "main")
        if api and verb == "tree":
            self._json([{"type": "file", "path": path, "size": len(content), "oid": _hash(content)} for path, content in files.items()])
        elif api:
            self._json({"id": name, "modelId": name, "sha": commit, "siblings": [{"rfilename": path} for path in files]})
        elif file in files:
            self._file(file, files[file], commit)
        else:
            raise _Refused(404, "EntryNotFound")

    def _commit(self, name: str, revision: str) -> tuple[str, dict[str, bytes]]:
        repository, token = self.hub.repositories.get(name), self.headers.get("Authorization")
        if repository is None:
            raise _Refused(404 if token else 401, "RepoNotFound")
        if repository.gated and token != f"Bearer {TOKEN}":
            raise _Refused(403 if token else 401, "GatedRepo")
        commit = repository.revisions.get(revision, revision)
        if commit not in repository.commits:
            raise _Refused(404, "RevisionNotFound")
        return commit, repository.commits[commit]

    def _file(self, name: str, content: bytes, commit: str) -> None:
        start = int(self.headers["Range"].removeprefix("bytes=").split("-")[0]) if "Range" in self.headers else 0
        headers = {"ETag": f'"{_hash(content)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        cuts = self.hub.cuts.get(name) if self.command == "GET" else None
        self._send(206 if start else 200, headers, content[start:], cut=cuts.pop(0) if cuts else None)

    def _json(self, content: object) -> None:
        self._send(200, {"Content-Type": "application/json"}, json.dumps(content).encode())

    def _send(self, status: int, headers: dict[str, str], body: bytes, *, cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:cut])
        self.close_connection = self.close_connection or cut is not None


class _Refused(Exception):
    def __init__(self, status: int, code: str):
        self.status, self.code = status, code


def _hash(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
