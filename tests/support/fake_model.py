"""A newest version without a model: its folder is a name, and its `gym api` a server of this process."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from gym_server.rounds.version_process import WRITTEN_NAME, WrittenVersion
from gym_server.rounds.versions import Version
from gym_server.web import newest_model
from gym_server.web.version_folder import VersionFolder

KEY = "gym-secret"


class FakeModel:
    """What stands for the writer and for `gym api`.

    Args:
        monkeypatch: Of the test.
        has_chat_template: Of the written versions.

    Attributes:
        answer: To every prompt; 404 for an empty one.
        status: That a new server has, once it is loaded.
        asked: Paths and bodies, in order.
    """

    def __init__(self, monkeypatch: Any, *, has_chat_template: bool = True) -> None:
        self.answer, self.status = "an answer", "ready"
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

        def write(folder: VersionFolder, version: Version) -> WrittenVersion:
            found = WrittenVersion(digest=version.digest, has_chat_template=has_chat_template)
            folder.path.mkdir(parents=True, exist_ok=True)
            (folder.path / WRITTEN_NAME).write_text(found.model_dump_json())
            return found

        monkeypatch.setattr(VersionFolder, "write", write)
        monkeypatch.setattr(newest_model, "ModelServer", self._server)

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()

    def _server(self, base: str, folder: Path, *_: Any, **__: Any) -> _FakeServer:
        return _FakeServer(f"http://127.0.0.1:{self.http.server_port}/v1", self.status)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        model = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                model.asked.append((self.path, body))
                assert self.headers["authorization"] == f"Bearer {KEY}"
                status, data = (
                    (200, _chosen(self.path, body, model.answer)) if model.answer else (404, _REFUSAL)
                )
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        return Handler


class _FakeServer:
    key = KEY

    def __init__(self, url: str, status: str) -> None:
        self.url, self.status = url, status

    def facts(self) -> dict[str, Any]:
        return {"output": ["line one", "it broke"]}

    def stop(self) -> None:
        self.status = "ended"

    def wait(self) -> None:
        pass


_REFUSAL = json.dumps({"error": {"message": "the prompt is too long"}}).encode()


def _chosen(path: str, body: dict[str, Any], text: str) -> bytes:
    is_chat = path.endswith("/chat/completions")
    if body["stream"]:
        choice: dict[str, Any] = {"delta": {"content": text}} if is_chat else {"text": text}
        return f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n".encode()
    choice = {"message": {"content": text}} if is_chat else {"text": text}
    return json.dumps({"choices": [{**choice, "finish_reason": "stop"}]}).encode()
