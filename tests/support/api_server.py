"""A server of OpenAI's API on loopback, in a thread of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import uvicorn

from gym_fed.serving.http.app import create_app
from gym_fed.serving.http.gateway import Gateway
from gym_fed.serving.http.keys import Authenticator, KeyFile
from gym_fed.serving.setup import Serving
from tests.support.wait import SECONDS

TEMPLATE_WITH_TOOLS = """\
{%- if tools %}<tool_call>{"name": ..., "arguments": ...}</tool_call>
{% for tool in tools %}{{ tool.function.name }} {% endfor %}
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A chat template for gym-nano, whose own has no tools."""


@contextmanager
def api_server(serving: Serving, keys: KeyFile | None) -> Iterator[Any]:
    """Its ``url``, its ``gateway``, and a client's ``http``."""
    gateway = Gateway(Authenticator(keys), request_timeout_seconds=60)
    gateway.serving = serving
    config = uvicorn.Config(create_app(gateway), port=0, lifespan="off", log_config=None, log_level="error")
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run)
    thread.start()
    while not running.started:
        time.sleep(0.01)
    port = running.servers[0].sockets[0].getsockname()[1]
    try:
        with httpx.Client(timeout=SECONDS, verify=False) as http:
            yield SimpleNamespace(url=f"http://127.0.0.1:{port}/v1", gateway=gateway, http=http)
    finally:
        running.should_exit = True
        thread.join()
