"""Chat templates with tools: the published ones that TRL carries, and some that are written here by the published form.

- Mistral v3 (7B v0.3, Nemo): tools stand before the last question, calls are a JSON list, ids have nine characters.
- Mistral v11 with ids (Small 3.2) and without (Ministral, Devstral).
- Hermes 2 Pro: as Qwen's, with results of role ``tool``.
- Llama 3.2 with Python's form, as vLLM has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gym_fed.serving.openai.refusals import RequestError
from tests.support.siblings import templates

MISTRAL = """{{ bos_token }}{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for m in messages %}{% if m.role == 'user' %}
{%- if tools and m == asked[-1] %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
[INST] {{ m.content }}[/INST]
{%- elif m.tool_calls %}[TOOL_CALLS] [
{%- for c in m.tool_calls %}
{%- if c.id is not defined or c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
{{- (c.function | tojson)[:-1] }}, "id": "{{ c.id }}"}{{ ', ' if not loop.last }}{% endfor %}]{{ eos_token }}
{%- elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif -%}
[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]
{%- endif %}{% endfor %}"""
_V11 = """{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for m in messages %}{% if m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]
{%- elif m.role == 'user' %}[INST]{{ m.content }}[/INST]
{%- elif m.role == 'assistant' %}{{ m.content }}{% for c in m.tool_calls or [] %}
{{- '[TOOL_CALLS]' + c.function.name }}CALL_ID[ARGS]{{ c.function.arguments | tojson }}{% endfor %}{{ eos_token }}
{%- else %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% endif %}{% endfor %}"""
MISTRAL_V11 = _V11.replace("CALL_ID", "")
MISTRAL_SMALL = _V11.replace("CALL_ID", "[CALL_ID]{{ c.id }}")
HERMES = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call with <tool_call>
{"name": <function-name>, "arguments": <args-dict>}
</tool_call><|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'tool' %}<tool_response>
{{ m.content }}
</tool_response>{% else %}{{ m.content }}{% for c in m.tool_calls or [] %}
<tool_call>
{{ c.function | tojson }}
</tool_call>{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PYTHONIC = """{% if tools %}<|start_header_id|>system<|end_header_id|>

Answer with a list of calls, [name(key=value)]: {{ tools | tojson }}<|eot_id|>{% endif %}{% for m in messages %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}{% if m.tool_calls %}[{% for c in m.tool_calls %}
{{- c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}
{%- endfor %}){{ ', ' if not loop.last }}{% endfor %}]{% else %}{{ m.content }}{% endif %}<|eot_id|>{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

FORMS: dict[str, str] = {
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_instruct_2507": "hermes",
    "qwen3_vl": "hermes",
    "qwen3_6": "qwen3_coder",
    "nemotron_3_nano": "qwen3_coder",
    "llama3_1": "llama",
    "llama3_2": "llama",
    "lfm2_v2": "pythonic",
    "gemma3": "described",
    "llama3": "described",
    "phi3_5": "described",
}
"""Published templates, and the form that each writes."""

OWN: dict[str, tuple[str, str]] = {
    "hermes": (HERMES, "hermes"),
    "mistral": (MISTRAL, "mistral"),
    "mistral_v11": (MISTRAL_V11, "mistral_v11"),
    "mistral_small": (MISTRAL_SMALL, "mistral_v11"),
    "pythonic": (PYTHONIC, "pythonic"),
}


def source_of(name: str) -> str:
    """A template by its name in ``FORMS`` or ``OWN``."""
    return OWN[name][0] if name in OWN else templates.shipped(name)


def form_of(name: str) -> str:
    return OWN[name][1] if name in OWN else FORMS[name]


def renderer(source: str) -> Callable[..., str]:
    """Renders as tokenizers do."""
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(rows: Any, tools: Any, *, prompt: bool = True) -> str:
        try:
            texts, _ = render_jinja_template(
                [rows],
                tools=tools or None,
                chat_template=source,
                add_generation_prompt=prompt,
                bos_token="<s>",
                eos_token="</s>",
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise RequestError(str(error)) from error
        return str(texts[0])

    return render
