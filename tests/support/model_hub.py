"""A Hugging Face Hub on loopback, for ``HF_ENDPOINT``: real repositories, and the ways in which a transfer goes wrong.

It serves what huggingface_hub and ``gym_fed.base.downloads`` request: descriptions and searches below ``/api``, and
files with HEAD, GET, ranges and the Hub's headers.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from huggingface_hub import constants

LFS_BYTES = 4096
"""From this size on a file is in LFS, as safetensors are: its checksum is a sha256."""


@dataclass
class Repo:
    """One repository.

    Attributes:
        files: Content by path.
        kind: ``model`` or ``dataset``.
        card: Metadata of its card.
        gated: As the Hub says it; files are then given to ``token`` alone.
        token: The one that may read.
        sent: Content that GET gives instead of what the checksums are of.
        cut: Bytes after which every GET of a file loses its connection; consumed by one request.
        pause: Seconds before each piece of 1 KiB.
        extra: Fields that are added to the description, and to what a search finds.
        older: The repository as it was, by commit.
        ranges: Whether a part of a file can be had.
    """

    files: dict[str, bytes]
    kind: str = "model"
    card: dict[str, Any] = field(default_factory=dict)
    gated: bool | str = False
    token: str | None = None
    sent: dict[str, bytes] = field(default_factory=dict)
    cut: dict[str, list[int]] = field(default_factory=dict)
    pause: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)
    ranges: bool = True
    older: dict[str, Repo] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path, **more: Any) -> Repo:
        """The files of a folder."""
        files = {
            str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()
        }
        return cls(files, **more)

    @property
    def commit(self) -> str:
        """Changes with the content."""
        named = sorted((path, hashlib.sha1(data).hexdigest()) for path, data in self.files.items())
        return hashlib.sha1(json.dumps(named).encode()).hexdigest()

    def at(self, commit: str | None) -> Repo:
        """The repository as it was at a commit."""
        return self.older.get(commit or "", self)

    def tree(self, below: str, deep: bool) -> list[dict[str, Any]]:
        """As ``/api/datasets/NAME/tree`` does: files and folders in the folder ``below``."""
        entries: dict[str, dict[str, Any]] = {}
        for path, data in self.files.items():
            inside = PurePosixPath(path)
            for folder in inside.parents[:-1]:
                entries[str(folder)] = {"type": "directory", "path": str(folder), "size": 0, "oid": "0" * 40}
            entries[path] = {"type": "file", "path": path, "size": len(data), "oid": blob_sha1(data)}
        return [
            entry
            for path, entry in entries.items()
            if (deep and (not below or path.startswith(f"{below}/")))
            or str(PurePosixPath(path).parent) == (below or ".")
        ]

    def describe(self, name: str) -> dict[str, Any]:
        """As ``/api/models/NAME?blobs=true`` does."""
        siblings = [
            {"rfilename": path, "size": len(data), "blobId": blob_sha1(data)}
            | (
                {"lfs": {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}}
                if len(data) >= LFS_BYTES
                else {}
            )
            for path, data in self.files.items()
        ]
        return {
            "id": name,
            "sha": self.commit,
            "private": False,
            "gated": self.gated,
            "cardData": self.card,
            "tags": [],
            "siblings": siblings,
            **self.extra,
        }


def blob_sha1(data: bytes) -> str:
    """Git's name of a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class ModelHub:
    """Serves ``repos`` at ``url`` until it is closed; ``requests`` has the method, path and range of each."""

    def __init__(self, repos: dict[str, Repo]) -> None:
        self.repos = repos
        self.requests: list[tuple[str, str, str | None]] = []
        hub = self

        class Handler(_Handler):
            served = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def stand_in(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        """Be the Hub of this process, also where the environment forbids the network, with an empty cache."""
        monkeypatch.setattr(constants, "ENDPOINT", self.url)
        template = self.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def gets(self, path: str) -> list[str | None]:
        """The ranges of the GET requests for a file."""
        return [given for method, url, given in self.requests if method == "GET" and url.endswith(path)]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    served: ModelHub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: tests read ``requests``."""

    def _answer(self, body: bool) -> None:
        parts = urlsplit(self.path)
        self.served.requests.append((self.command, unquote(parts.path), self.headers.get("Range")))
        if search := re.fullmatch(r"/api/(model|dataset)s", parts.path):
            wanted = parse_qs(parts.query).get("search", [""])[0].lower()
            found = [
                {"id": name, **repo.extra}
                for name, repo in self.served.repos.items()
                if wanted in name.lower() and repo.kind == search[1]
            ]
            return self._json(found)
        if found := re.fullmatch(r"/api/(model|dataset)s/([^/]+/[^/]+)/tree/([^/]+)(/.*)?", parts.path):
            if repo := self._repo(unquote(found[2]), found[1]):
                below, deep = unquote(found[4] or "").strip("/"), "recursive=true" in parts.query.lower()
                self._json(repo.at(found[3]).tree(below, deep))
            return None
        if found := re.fullmatch(r"/api/(model|dataset)s/(.+?)(?:/revision/([^/]+))?", parts.path):
            repo = self._repo(unquote(found[2]), found[1])
            return self._json(repo.at(found[3]).describe(unquote(found[2]))) if repo else None
        if found := re.fullmatch(r"/(datasets/)?(.+)/resolve/([^/]+)/(.+)", parts.path):
            name = unquote(found[2])
            if (repo := self._repo(name, "dataset" if found[1] else "model")) is not None:
                self._file(repo.at(found[3]), found[3], unquote(found[4]), body)
            return None
        return self._refuse(404, "EntryNotFound")

    def _repo(self, name: str, kind: str) -> Repo | None:
        repo = self.served.repos.get(name)
        if repo is None or repo.kind != kind:
            self._refuse(404, "RepoNotFound")
            return None
        return repo

    def _file(self, repo: Repo, commit: str, path: str, body: bool) -> None:
        if repo.gated and self.headers.get("Authorization") != f"Bearer {repo.token}":
            return self._refuse(401 if "Authorization" not in self.headers else 403, "GatedRepo")
        if commit not in (repo.commit, "main"):
            return self._refuse(404, "RevisionNotFound")
        if path not in repo.files:
            return self._refuse(404, "EntryNotFound")
        true = repo.files[path]
        data = repo.sent.get(path, true)
        digest = hashlib.sha256(true).hexdigest() if len(true) >= LFS_BYTES else blob_sha1(true)
        start = 0
        given = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")) if repo.ranges else None
        if given:
            start = int(given[1])
            if start >= len(data):
                return self._refuse(416, "")
        self.send_response(206 if given else 200)
        if given:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        for key, value in {
            "Content-Length": str(len(data) - start),
            "ETag": f'"{digest}"',
            "X-Repo-Commit": repo.commit,
            "X-Linked-Size": str(len(true)),
            "X-Linked-ETag": f'"{digest}"',
            "Accept-Ranges": "bytes",
        }.items():
            self.send_header(key, value)
        self.end_headers()
        if not body:
            return None
        cuts = repo.cut.get(path, [])
        end = min(len(data), start + cuts.pop(0)) if cuts else len(data)
        piece = 1 << 10 if repo.pause else len(data) or 1
        for at in range(start, end, piece):
            time.sleep(repo.pause)
            try:
                self.wfile.write(data[at : min(end, at + piece)])
            except ConnectionError:  # the other end was killed
                self.close_connection = True
                return None
        if end < len(data):
            self.close_connection = True
        return None

    def _json(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()
