"""Held-out figures of a saved model by transformers and PEFT alone; a process of its own, its last line is JSON.

    python benchmarks/_smollm2_heldout.py sft|dpo MODEL SAVED DATA

``MODEL`` is the base, ``SAVED`` a model folder or an adapter's. For sft: nats per token of the answers, their end token
counted. For dpo: the share of pairs whose chosen answer gained more log-probability on the base than the rejected one,
and the mean of DPO's loss at beta 0.1 (Rafailov et al. 2023, eq. 7).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from _smollm2_rows import HELDOUT_PAIRS, HELDOUT_QUESTIONS, pairs, questions
from torch.nn.functional import log_softmax, logsigmoid

BETA = 0.1


def main() -> None:
    """Measure as ``sys.argv`` says."""
    task, base, saved, data = sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])
    model, tokenizer = read(base, saved)
    if task == "sft":
        rows = questions(data)[-HELDOUT_QUESTIONS:]
        scores = [
            answer_log_probability(model, tokenizer, row["messages"][:-1], row["messages"]) for row in rows
        ]
        print(json.dumps({"loss": -sum(s for s, _ in scores) / sum(n for _, n in scores)}))
        return
    rows = pairs(data, tokenizer)[-HELDOUT_PAIRS:]
    reference, _ = read(base, Path(base))
    margins = torch.tensor([margin(model, reference, tokenizer, row) for row in rows])
    figures = {
        "accuracy": float((margins > 0).double().mean()),
        "loss": float(-logsigmoid(BETA * margins).mean()),
        "pairs": len(rows),
    }
    print(json.dumps(figures))


def read(base: str, saved: Path) -> tuple[Any, Any]:
    """The saved model in float32, an adapter merged in, and the base's tokenizer."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    adapter = (saved / "adapter_config.json").is_file()
    model: Any = AutoModelForCausalLM.from_pretrained(base if adapter else saved, dtype=torch.float32)
    if adapter:
        model = PeftModel.from_pretrained(model, str(saved)).merge_and_unload()
    return model.eval(), AutoTokenizer.from_pretrained(base)


def margin(model: Any, reference: Any, tokenizer: Any, row: dict[str, Any]) -> float:
    """``log(p(chosen) / p_ref(chosen)) - log(p(rejected) / p_ref(rejected))``."""
    gains = {}
    for key in ("chosen", "rejected"):
        whole = row["prompt"] + row[key]
        now, before = (
            answer_log_probability(one, tokenizer, row["prompt"], whole)[0] for one in (model, reference)
        )
        gains[key] = now - before
    return gains["chosen"] - gains["rejected"]


@torch.inference_mode()
def answer_log_probability(
    model: Any, tokenizer: Any, prompt: list[dict[str, str]], whole: list[dict[str, str]]
) -> tuple[float, int]:
    """Summed log-probability of the answer's tokens up to the end of its turn, and how many there are."""
    start = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    text = tokenizer.apply_chat_template(whole, tokenize=False).removesuffix("\n")
    if not text.startswith(start):
        raise SystemExit("the chat template does not begin an answer as it begins a generation")
    first = len(tokenizer(start, add_special_tokens=False)["input_ids"])
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    scores = log_softmax(model(input_ids=ids).logits[0, :-1].float(), dim=-1)
    of_answer = scores.gather(1, ids[0, 1:, None])[first - 1 :]
    return float(of_answer.sum()), len(of_answer)


if __name__ == "__main__":
    main()
