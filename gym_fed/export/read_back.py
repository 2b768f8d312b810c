"""Reads an export back in a process of its own, and writes down what it computes.

``python -m gym_fed.export.read_back JOB`` is what ``run.py`` starts. A model is read by transformers and an adapter
by PEFT, not by this project's loaders. JOB is the path of a JSON object, which names the file for the answer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(job_file: str) -> None:
    """Do the job: ``{"parts": ..., "prompts": [...], "threads": n, "answer": path, "tokens": n}``."""
    import torch
    from safetensors.torch import save_file

    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
    model, tokenizer = load(job["parts"])
    found = answers(model, tokenizer, job["prompts"], job["tokens"])
    save_file(found, job["answer"])


def load(parts: dict[str, Any]) -> tuple[Any, Any]:
    """The model in float32, and the tokenizer (or processor) that lies beside it."""
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoProcessor,
        AutoTokenizer,
    )

    folder = parts["model"]
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    sees = hasattr(config, "vision_config")
    kind: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    model = kind.from_pretrained(
        folder,
        dtype=torch.float32,
        local_files_only=True,
        trust_remote_code=False,
        attn_implementation="sdpa",
    )
    adapters = parts.get("adapters", [])
    if adapters:
        from peft import PeftModel

        for below in adapters[:-1]:
            model = PeftModel.from_pretrained(model, below).merge_and_unload()
        model = PeftModel.from_pretrained(model, adapters[-1])
    if "delta" in parts:
        from gym_fed.delta.apply import apply_delta
        from gym_fed.delta.file import DeltaFile

        with DeltaFile.open(Path(parts["delta"])) as opened:
            apply_delta(model, opened)
    beside = adapters[-1] if adapters else folder
    reader: Any = AutoProcessor if sees else AutoTokenizer
    return model.eval(), reader.from_pretrained(beside, local_files_only=True, trust_remote_code=False)


def answers(model: Any, tokenizer: Any, prompts: list[str], tokens: int) -> dict[str, Any]:
    """Ids and logits of every prompt, and ``tokens`` greedy ones after the last.

    Args:
        model: In evaluation mode.
        tokenizer: With a chat template, each prompt is the message of a user; else a plain text.
        prompts: Short texts.
        tokens: How many are written after the last prompt.

    Returns:
        ``ids.N`` ``[length]`` int64 and ``logits.N`` ``[length, vocabulary]`` float32 for each prompt, and ``greedy``.
    """
    import torch

    plain = getattr(tokenizer, "tokenizer", tokenizer)
    found: dict[str, Any] = {}
    ids: Any = None
    with torch.inference_mode():
        for number, prompt in enumerate(prompts):
            if plain.chat_template is not None:
                message = [{"role": "user", "content": prompt}]
                text = plain.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
                ids = plain(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
            else:
                ids = plain(prompt, return_tensors="pt")["input_ids"]
            found[f"ids.{number}"] = ids[0].clone()
            found[f"logits.{number}"] = model(input_ids=ids, use_cache=False).logits[0].float().clone()
        written = []
        for _ in range(tokens):
            following = model(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1)
            written.append(following)
            ids = torch.cat([ids, following[:, None]], dim=1)
        found["greedy"] = torch.cat(written).clone()
    return found


if __name__ == "__main__":
    main(sys.argv[1])
