"""Token ids as programs without transformers make them: ``tokenizers`` and the chat template, from the files beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gym_fed.core.bounded.chat import render_chat
from gym_fed.export.readers.reading import SPECIAL


class Tokens:
    """The tokenizer of a folder.

    Args:
        folder: With ``tokenizer.json``; the chat template lies in ``chat_template.jinja`` or ``tokenizer_config.json``.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._config: dict[str, Any] = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
        template = folder / "chat_template.jinja"
        self._template = (
            template.read_text("utf-8") if template.is_file() else self._config.get("chat_template")
        )

    def ids(self, prompt: str) -> list[int]:
        """See ``LoadedExport.ids``."""
        if self._template is None:
            return list(self._tokenizer.encode(prompt).ids)
        text = rendered(str(self._template), prompt, self._special())
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def text_ids(self, text: str) -> list[int]:
        """See ``LoadedExport.text_ids``."""
        return list(self._tokenizer.encode(text).ids)

    def special_ids(self) -> dict[str, int]:
        """See ``LoadedExport.special_ids``."""
        found = {name: self._special().get(f"{name}_token") for name in SPECIAL}
        numbers = {
            name: self._tokenizer.token_to_id(text) for name, text in found.items() if text is not None
        }
        return {name: number for name, number in numbers.items() if number is not None}

    def chat_template(self) -> str | None:
        """See ``LoadedExport.chat_template``."""
        return self._template if isinstance(self._template, str) else None

    def _special(self) -> dict[str, str]:
        return {
            key: value if isinstance(value, str) else value["content"]
            for key, value in self._config.items()
            if key.endswith("_token") and value is not None and not isinstance(value, bool)
        }


def rendered(template: str, prompt: str, special: dict[str, str]) -> str:
    """A user's message in a chat template, up to where the answer begins."""
    messages, tokens = [{"role": "user", "content": prompt}], dict[str, Any](special)
    return render_chat([messages], chat_template=template, add_generation_prompt=True, **tokens)[0][0]
