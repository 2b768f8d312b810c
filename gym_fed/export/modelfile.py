"""Ollama's Modelfile for an exported GGUF file: its chat template, translated, and the text that ends an answer.

Ollama does not read Jinja, and recognises only the templates of published models by their text. So the template is
derived from a question, with and without a system message, rendered by the model's own template.
"""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateError

_SYSTEM, _PROMPT, _RESPONSE = "\x01system\x01", "\x01prompt\x01", "\x01response\x01"
_PLACES = {_SYSTEM: "{{ .System }}", _PROMPT: "{{ .Prompt }}", _RESPONSE: "{{ .Response }}"}


def modelfile(file: str, tokenizer: Any) -> str:
    """Return ``FROM``, ``TEMPLATE`` and ``PARAMETER stop`` for a GGUF file.

    Args:
        file: The path for the Modelfile.
        tokenizer: The tokenizer of the exported model.
    """
    lines = [f"FROM {file}"]
    template = ollama_template(tokenizer)
    if template is None:
        lines.append("# write TEMPLATE here by hand: Ollama has no equivalent of the model's chat template")
    else:
        lines.append(f'TEMPLATE """{template}"""')
        if tokenizer.eos_token and not _ends_a_value(tokenizer.eos_token):
            lines.append(f'PARAMETER stop "{tokenizer.eos_token}"')
        elif tokenizer.eos_token:
            lines.append("# write PARAMETER stop here by hand: the end token contains quotes or line breaks")
    return "\n".join(lines) + "\n"


def ollama_template(tokenizer: Any) -> str | None:
    """Translate the tokenizer's chat template to Ollama's, turn by turn; None if it has no such form."""
    if not tokenizer.chat_template:
        return None
    from gym_fed.data.chat_templates.rendering import template_of

    template, user = template_of(tokenizer), {"role": "user", "content": _PROMPT}
    try:
        alone = template.text([user], prompt=True)
        with_system = template.text([{"role": "system", "content": _SYSTEM}, user], prompt=True)
        answered = template.text([user, {"role": "assistant", "content": _RESPONSE}])
    except (TemplateError, TypeError):
        return None
    begin = tokenizer.bos_token or ""  # llama.cpp adds it to prompts by itself
    alone, with_system = alone.removeprefix(begin), with_system.removeprefix(begin)
    same = _common_end(alone, with_system)
    question, end = alone[len(alone) - same :], answered.partition(_RESPONSE)[2]
    first, system = alone[: len(alone) - same], with_system[: len(with_system) - same]
    usable = (question.count(_PROMPT), system.count(_SYSTEM)) == (1, 1) and _RESPONSE in answered
    if not usable or any(mark in text for text in (system, first, question, end) for mark in ("{{", '"""')):
        return None
    if end.endswith('"'):  # the closing quotes of the value would start one character too early
        return None
    otherwise = f"{{{{ else }}}}{first}" if first else ""
    text = f"{{{{ if .System }}}}{system}{otherwise}{{{{ end }}}}{question}{_RESPONSE}{end}"
    for mark, place in _PLACES.items():
        text = text.replace(mark, place)
    return text


def _ends_a_value(text: str) -> bool:
    """Return True if a text would terminate its own value in a Modelfile, so that the rest becomes an instruction."""
    return '"' in text or not text.isprintable()


def _common_end(first: str, second: str) -> int:
    """Return the length of the common suffix of two texts."""
    number = 0
    for a, b in zip(reversed(first), reversed(second), strict=False):
        if a != b:
            break
        number += 1
    return number
