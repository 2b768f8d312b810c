"""A Modelfile of Ollama for an exported GGUF file: its chat template, translated, and the text that ends an answer.

Ollama reads no Jinja, and takes the templates of published models alone by their text. So the template is written for
it, from what the model's own one makes of a question with and without a system message.
"""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateError

_SYSTEM, _PROMPT, _RESPONSE = "\x01system\x01", "\x01prompt\x01", "\x01response\x01"
_PLACES = {_SYSTEM: "{{ .System }}", _PROMPT: "{{ .Prompt }}", _RESPONSE: "{{ .Response }}"}


def modelfile(file: str, tokenizer: Any) -> str:
    """``FROM``, ``TEMPLATE`` and ``PARAMETER stop`` for a GGUF file.

    Args:
        file: Its path, as the Modelfile names it.
        tokenizer: The tokenizer of the exported model.
    """
    lines = [f"FROM {file}"]
    template = ollama_template(tokenizer)
    if template is None:
        lines.append("# write its TEMPLATE here by hand: its chat template has no form that Ollama reads")
    else:
        lines.append(f'TEMPLATE """{template}"""')
        if tokenizer.eos_token and not _ends_a_value(tokenizer.eos_token):
            lines.append(f'PARAMETER stop "{tokenizer.eos_token}"')
        elif tokenizer.eos_token:
            lines.append("# write its PARAMETER stop here by hand: its end token has quotes or lines")
    return "\n".join(lines) + "\n"


def ollama_template(tokenizer: Any) -> str | None:
    """The tokenizer's chat template in Ollama's words, for a turn after the other; None where it has no such form."""
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
    begin = tokenizer.bos_token or ""  # llama.cpp puts it before a prompt by itself
    alone, with_system = alone.removeprefix(begin), with_system.removeprefix(begin)
    same = _common_end(alone, with_system)
    question, end = alone[len(alone) - same :], answered.partition(_RESPONSE)[2]
    first, system = alone[: len(alone) - same], with_system[: len(with_system) - same]
    whole = (question.count(_PROMPT), system.count(_SYSTEM)) == (1, 1) and _RESPONSE in answered
    if not whole or any(mark in text for text in (system, first, question, end) for mark in ("{{", '"""')):
        return None
    if end.endswith('"'):  # the quotes that end the value would begin one too early
        return None
    otherwise = f"{{{{ else }}}}{first}" if first else ""
    text = f"{{{{ if .System }}}}{system}{otherwise}{{{{ end }}}}{question}{_RESPONSE}{end}"
    for mark, place in _PLACES.items():
        text = text.replace(mark, place)
    return text


def _ends_a_value(text: str) -> bool:
    """Return whether a text would end its own value in a Modelfile, so that what follows were an instruction."""
    return '"' in text or not text.isprintable()


def _common_end(one: str, other: str) -> int:
    """How many characters two texts end with alike."""
    number = 0
    for a, b in zip(reversed(one), reversed(other), strict=False):
        if a != b:
            break
        number += 1
    return number
