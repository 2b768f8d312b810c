"""Makes templates that drop the reasoning of earlier turns write it, so that it can be learned.

What a template drops once another question follows is no part of a later prompt. A row that is to teach it needs it in
its text all the same: by the template's own switch where it has one, else by taking the condition out of it.
"""

from __future__ import annotations

from dataclasses import replace

from gym_fed.data.chat_templates.rendering import Template

_SWITCHES = {
    "truncate_history_thinking": False,  # Nemotron
    "preserve_thinking": True,  # Qwen3.6, LFM2.5, Gemma 4
    "keep_past_thinking": True,
    "clear_thinking": False,  # GLM
}
_CONDITIONS = (
    ("loop.index0 > ns.last_user_index and reasoning_content", "reasoning_content"),  # GLM-4
    ("(preserve_thinking and message.get('tool_calls'))", "preserve_thinking"),  # Gemma 4
    (
        "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}",
        "",
    ),  # DeepSeek
    (" and not future_final_message.found", ""),  # GPT-OSS, before calls of tools
    (  # GPT-OSS, before an answer that is not the last
        '"<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>"',
        '("<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" if message.thinking '
        'else "") + "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>"',
    ),
)


def showing_history(template: Template) -> Template:
    """The template with the reasoning of every turn; itself where nothing is known to hide it."""
    source = template.source
    for condition, instead in _CONDITIONS:
        source = source.replace(condition, instead)
    switches = {name: value for name, value in _SWITCHES.items() if name in source}
    return replace(template, source=source, variables={**template.variables, **switches})
