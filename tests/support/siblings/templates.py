"""Chat templates of public models.

``shipped`` reads the repositories' own texts, which TRL carries. The five below are written here by the published
format, for what a conversation of texts (and images, for LLaVA) needs: their tool calls are left out.

- Mistral 7B v0.3: ``<s>[INST] question[/INST] answer</s>``; instructions stand before the last question.
- Mixtral v0.1: ``<s> [INST] question [/INST] answer</s>``; instructions stand before the first question.
- Phi-4-mini: ``<|role|>text<|end|>``; ``<|endoftext|>`` ends the whole.
- LLaVA-1.5: ``USER: <image>\\nquestion ASSISTANT: answer``; nothing ends an answer. Contents are lists of
  parts: a text that is no part is left out, as by the published one.
- SmolLM2: ChatML with the model's instructions where a conversation has none.
"""

from __future__ import annotations

_ALTERNATE = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set said = messages[0]['content'] + '\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set said = '' %}{% set turns = messages %}{% endif %}"
    "{% for message in turns %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant must take turns') }}{% endif %}"
)
MISTRAL = (
    _ALTERNATE + "{% if message['role'] == 'user' %}{{ '[INST] ' + (said if loop.last or "
    "(loop.index0 + 2 == turns | length) else '') + message['content'] + '[/INST]' }}"
    "{% else %}{{ ' ' + message['content'] | trim + eos_token }}{% endif %}{% endfor %}"
)
MIXTRAL = (
    _ALTERNATE
    + "{% if message['role'] == 'user' %}{{ ' [INST] ' + (said if loop.first else '') + message['content'] "
    "+ ' [/INST]' }}{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
PHI4_MINI = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{{ '<|assistant|>' if add_generation_prompt else eos_token }}"
)
LLAVA = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ part['text'] + ' ' }}{% endgeneration %}{% else %}{{ part['text'] + ' ' }}{% endif %}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def shipped(name: str) -> str:
    """The published template that TRL carries under ``name``."""
    from gym_fed.data.chat_templates.rendering import trl_templates

    return (trl_templates() / f"{name}.jinja").read_text(encoding="utf-8")
