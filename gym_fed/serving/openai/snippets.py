"""Code snippets that call a server with the openai client, LangChain or Open WebUI."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from gym_fed.core.text import plain

DEFAULT_URL = "http://127.0.0.1:8000/v1"
"""The default URL of `gym api`."""

NO_KEY = "none-needed"
"""The key for a server without keys, since some clients require one."""

YOUR_KEY = "YOUR-KEY"


@dataclass(frozen=True)
class ServedModel:
    """A model on a server.

    Attributes:
        url: The address of the API, with ``/v1``.
        model: The name of the model in requests.
        key: The API key.
        is_chat: True if the model takes messages, False if it completes text.
    """

    url: str
    model: str
    key: str = NO_KEY
    is_chat: bool = True


def openai_snippet(served: ServedModel) -> str:
    """Return Python code that uses the openai client."""
    head = f"""\
from openai import OpenAI

client = OpenAI(base_url={served.url!r}, api_key={served.key!r})
"""
    if served.is_chat:
        return f"""{head}answer = client.chat.completions.create(
    model={served.model!r}, messages=[{{"role": "user", "content": "Hello"}}], max_tokens=64
)
print(answer.choices[0].message.content)
"""
    return f"""{head}answer = client.completions.create(model={served.model!r}, prompt="Hello", max_tokens=64)
print(answer.choices[0].text)
"""


def langchain_snippet(served: ServedModel) -> str:
    """Return Python code with ``langchain-openai``."""
    name, text = ("ChatOpenAI", ".content") if served.is_chat else ("OpenAI", "")
    return f"""\
from langchain_openai import {name}

model = {name}(
    base_url={served.url!r}, api_key={served.key!r}, model={served.model!r}, max_tokens=64
)
print(model.invoke("Hello"){text})
"""


def open_webui_snippet(served: ServedModel) -> str:
    """Return environment variables for Open WebUI, which has no view for plain completions."""
    address, key = shlex.quote(served.url), shlex.quote(served.key)
    text = f"""\
OPENAI_API_BASE_URL={address} OPENAI_API_KEY={key} open-webui serve
# in the browser, choose the model {plain(served.model)}
"""
    if served.is_chat:
        return text
    return f"# Open WebUI sends messages: start the server with gym api --chat-template NAME\n{text}"
