"""A tiny model that has learned a few answers with thoughts by heart, in the formats of published templates."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch

THINK = ("<think>", "</think>")
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
TOOL = {
    "type": "function",
    "function": {
        "name": "rain",
        "description": "How much it rains.",
        "parameters": {"type": "object", "properties": {"in": {"type": "string", "description": "City"}}},
    },
}
_STEPS = 1500


class Learned(NamedTuple):
    """A question, and what the model writes after the prompt of a template."""

    template: str
    question: str
    raw: str
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.question}]


def template_file(name: str) -> Path:
    """One of TRL's published chat templates."""
    return Path(str(files("trl") / "chat_templates" / f"{name}.jinja"))


def learn(folder: Path, tokenizer: Any, answers: Sequence[Learned], marks: Sequence[str] = ()) -> Path:
    """Train a model until it writes every answer word for word when greedy; save it with its tokenizer.

    Args:
        folder: Where to save.
        tokenizer: gym-nano's tokenizer, which is changed.
        answers: What to learn.
        marks: Texts that become single tokens: plain ones for ``THINK``, control tokens for ``HARMONY``.
    """
    from tokenizers import AddedToken
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer.add_tokens([AddedToken(mark, special=mark in HARMONY, normalized=False) for mark in marks])
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=96,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=24,
            max_position_embeddings=2048,
            eos_token_id=[tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(_ends(marks))],
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more would only spin, for matrices of this size
    try:
        _train(model, [_encode(tokenizer, answer) for answer in answers])
    finally:
        torch.set_num_threads(threads)
    model.save_pretrained(folder)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    return folder


def _train(model: Any, examples: Sequence[tuple[list[int], list[int]]]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = [float("inf")]
    for _ in range(_STEPS):
        optimizer.zero_grad()
        losses = [_learn_one(model, prompt, answer) for prompt, answer in examples]
        if max(losses) < 0.05:
            return
        optimizer.step()
    raise AssertionError(f"not learned: losses {losses}")


def _learn_one(model: Any, prompt: list[int], answer: list[int]) -> float:
    """Add the gradient of one answer, and return its loss; infinite while a token is not the likeliest.

    Answers are computed one by one, since the longest prompt has a hundred times the tokens of the shortest.
    """
    ids, labels = torch.tensor([[*prompt, *answer]]), torch.tensor(answer)
    logits = model(input_ids=ids, logits_to_keep=len(answer) + 1).logits[0, :-1]
    loss = torch.nn.functional.cross_entropy(logits, labels)
    loss.backward()
    return loss.item() if bool((logits.argmax(-1) == labels).all()) else float("inf")


def _ends(marks: Sequence[str]) -> list[str]:
    return [mark for mark in marks if mark in ("<|call|>", "<|return|>")]


def _encode(tokenizer: Any, answer: Learned) -> tuple[list[int], list[int]]:
    prompt = tokenizer.apply_chat_template(
        answer.messages,
        tools=list(answer.tools) or None,
        chat_template=template_file(answer.template).read_text(encoding="utf-8"),
        add_generation_prompt=True,
        return_dict=True,
    )["input_ids"]
    written = tokenizer(answer.raw, add_special_tokens=False)["input_ids"]
    return list(prompt), [*written, tokenizer.eos_token_id]
