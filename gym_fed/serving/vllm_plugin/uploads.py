"""Receive adapters that a training run sends to vLLM, check them, and store them in a private folder.

``--middleware gym_fed.serving.vllm_plugin.uploads.AdapterUploads`` adds two routes to vLLM's HTTP server, so that the
run may be on another machine. ``PUT /gym/adapters/NAME`` takes the bytes of a PEFT adapter, with its config in the
metadata ``adapter_config``, and returns the ``path`` for vLLM's ``/v1/load_lora_adapter``; ``DELETE`` removes it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

PREFIX = "/gym/adapters/"
CONFIG_KEY = "adapter_config"
"""Key of the safetensors metadata that contains the text of ``adapter_config.json``."""

MAX_BYTES = 4 * 2**30
MAX_ADAPTERS = 64
"""Maximum number of stored adapters; the run deletes those that it no longer needs."""

_NAME = re.compile(r"[a-z0-9-]{1,80}")
_MAX_HEADER = 16 * 2**20
_Receive = Callable[[], Awaitable[Any]]
_Send = Callable[[Any], Awaitable[None]]


class UploadRefusedError(ValueError):
    """Raised if an upload is refused, with the reason."""


class AdapterUploads:
    """ASGI middleware for uploads; requests of other paths reach vLLM unchanged."""

    def __init__(self, app: Callable[[Any, _Receive, _Send], Awaitable[None]]) -> None:
        self._app = app
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    async def __call__(self, scope: Any, receive: _Receive, send: _Send) -> None:
        """Answer a request about an adapter, or pass it on."""
        if scope["type"] != "http" or not scope["path"].startswith(PREFIX):
            await self._app(scope, receive, send)
            return
        name = scope["path"].removeprefix(PREFIX)
        try:
            if not _is_authorized(scope):
                await _respond(send, 401, error="the key is invalid")
            elif not _NAME.fullmatch(name) or scope["method"] not in ("PUT", "DELETE"):
                await _respond(send, 404, error="no such adapter or method")
            elif scope["method"] == "PUT":
                await _respond(send, 200, path=str(await self._store(name, receive)))
            else:
                shutil.rmtree(self._root() / name, ignore_errors=True)
                await _respond(send, 200)
        except UploadRefusedError as error:
            await _respond(send, 400, error=str(error))
        except OSError as error:
            await _respond(send, 507, error=f"the adapter cannot be stored: {error.strerror}")

    async def _store(self, name: str, receive: _Receive) -> Path:
        root = self._root()
        folder, part = root / name, root / f".{name}.part"
        if not folder.exists() and sum(1 for _ in root.iterdir()) >= MAX_ADAPTERS:
            raise UploadRefusedError(f"{MAX_ADAPTERS} adapters are already stored")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(mode=0o700)
        try:
            file = part / "adapter_model.safetensors"
            await _receive_into(file, receive)
            (part / "adapter_config.json").write_text(json.dumps(_config_of(file)), encoding="utf-8")
            shutil.rmtree(folder, ignore_errors=True)
            part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return folder

    def _root(self) -> Path:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="gym-adapters-")  # readable only by this user
        return Path(self._folder.name)


def _is_authorized(scope: Any) -> bool:
    """Check the key, since vLLM checks only ``/v1``; as in vLLM, ``--api-key`` takes precedence over the variable."""
    args = getattr(getattr(scope.get("app"), "state", None), "args", None)
    keys = [key for key in getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY", "")] if key]
    given = _digest(dict(scope["headers"]).get(b"authorization", b""))
    return not keys or any(hmac.compare_digest(given, _digest(f"Bearer {key}".encode())) for key in keys)


async def _receive_into(file: Path, receive: _Receive) -> None:
    size = 0
    with file.open("xb") as out:
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise UploadRefusedError("the connection ended before the adapter")
            size += len(message.get("body", b""))
            if size > MAX_BYTES:
                raise UploadRefusedError(f"the adapter has more than {MAX_BYTES} bytes")
            out.write(message.get("body", b""))
            if not message.get("more_body", False):
                return


def _config_of(file: Path) -> dict[str, Any]:
    """Return the adapter's config from a safetensors header.

    Raises:
        UploadRefusedError: If this is not a safetensors file with such a config.
    """
    with file.open("rb") as opened:
        size = opened.read(8)
        length = struct.unpack("<Q", size)[0] if len(size) == 8 else 0
        if not 0 < length <= _MAX_HEADER:
            raise UploadRefusedError("the adapter is not a safetensors file")
        header = opened.read(length)
    try:
        config = json.loads(json.loads(header)["__metadata__"][CONFIG_KEY])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UploadRefusedError(f"the adapter's header has no {CONFIG_KEY}: {error!r}") from error
    if not isinstance(config, dict):
        raise UploadRefusedError(f"the adapter's {CONFIG_KEY} is not an object")
    return config


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()


async def _respond(send: _Send, status: int, **values: str) -> None:
    body = json.dumps(values).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
