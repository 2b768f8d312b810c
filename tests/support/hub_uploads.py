"""A Hub on loopback that takes uploads: repositories are made, large files sent apart, files committed together."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import urlsplit

import pytest
import yaml
from huggingface_hub import constants

TOKEN = "hf_willetwillet"
LARGE_BYTES = 4096
"""From this size on a file is sent apart, by its sha256."""


class UploadHub:
    """Takes uploads with ``TOKEN`` at ``url`` until it is closed.

    Attributes:
        repos: Files by path, by the repository's name.
        private: Whether a repository is, by name.
        requests: Method and path of each.
        refuse: Status by the beginning of a path: what begins so is answered with it.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.refuse: dict[str, int] = {}
        hub = self

        class Handler(_Handler):
            served = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Be the Hub of this process, with a login."""
        monkeypatch.setattr(constants, "ENDPOINT", self.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    served: UploadHub

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: tests read ``requests``."""

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urlsplit(self.path).path
        hub = self.served
        hub.requests.append((self.command, path))
        for beginning, status in hub.refuse.items():
            if path.startswith(beginning):
                return self._json({"error": "refused"}, status)
        if self.command == "PUT":  # where a batch said: without a token, as to a store
            digest = path.rpartition("/")[2]
            if hashlib.sha256(body).hexdigest() != digest:
                return self._json({"error": "other bytes"}, 400)
            hub.blobs[digest] = body
            return self._json({})
        if path == "/api/validate-yaml":
            head = re.match(r"---\n(.*?)\n---", json.loads(body)["content"], re.DOTALL)
            good = head is not None and isinstance(yaml.safe_load(head[1]), dict)
            return self._json(
                {"errors": [], "warnings": []} if good else {"errors": []}, 200 if good else 400
            )
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._json({"error": "Invalid credentials"}, 401)
        if path == "/api/repos/create":
            given = json.loads(body)
            name = f"{given['organization']}/{given['name']}" if given.get("organization") else given["name"]
            if name in hub.repos:
                return self._json({"url": f"{hub.url}/{name}", "error": "there is one"}, 409)
            hub.repos[name], hub.private[name] = (
                {},
                given.get("private", given.get("visibility") == "private"),
            )
            return self._json({"url": f"{hub.url}/{name}"})
        if found := re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
            return self._json(
                {"transfer": "basic", "objects": [self._place(one) for one in json.loads(body)["objects"]]}
            )
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", path):
            files = [
                {
                    "path": one["path"],
                    "uploadMode": "lfs" if one["size"] >= LARGE_BYTES else "regular",
                    "shouldIgnore": False,
                    "oid": None,
                }
                for one in json.loads(body)["files"]
            ]
            return self._json({"files": files})
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
            return self._commit(found[1], body)
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/main)?", path):
            known = found[1] in hub.repos
            return self._json({"id": found[1], "sha": "0" * 40, "siblings": []}, 200 if known else 404)
        return self._json({"error": path}, 404)

    def _place(self, wanted: dict[str, Any]) -> dict[str, Any]:
        if wanted["oid"] in self.served.blobs:
            return wanted
        return {**wanted, "actions": {"upload": {"href": f"{self.served.url}/blobs/{wanted['oid']}"}}}

    def _commit(self, name: str, body: bytes) -> None:
        files = self.served.repos[name]
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.served.blobs[value["oid"]]
        oid = hashlib.sha1(body).hexdigest()
        self._json(
            {"commitUrl": f"{self.served.url}/{name}/commit/{oid}", "commitOid": oid, "pullRequestUrl": None}
        )

    def _json(self, value: Any, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
