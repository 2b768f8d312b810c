"""One side of `drafts.py`, in its own process: ``python _drafts_side.py MODEL FORMAT KIND USERS``, as JSON each."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from gym_fed.config.serving import ServingConfig
from gym_fed.serving.engine.request import GenerationRequest, SamplingParams
from gym_fed.serving.setup import Serving, open_serving

QUESTIONS = (
    "Explain how a bicycle stays upright when it moves.",
    "Write a short story about a lighthouse keeper and a storm.",
    "What is photosynthesis? Explain it for a child.",
    "List the steps to bake bread at home.",
    "Describe the causes of the French Revolution.",
    "How does a refrigerator work?",
    "Give advice to someone learning to play the piano.",
    "Write a letter to a friend about a trip to the mountains.",
)
NEW = 128


def main(model: str, base_format: str, kind: str, users: list[int]) -> dict[str, dict[str, Any]]:
    """Return, by number of users, the rate, the answers, and the proposed and accepted tokens."""
    engine = {"speculative": kind, "prefix_cache": False}
    config = ServingConfig(
        base=model, dtype="bfloat16", base_format=base_format, num_threads=1, engine=engine
    )
    found = {}
    with open_serving(config) as serving:
        for count in users:
            turn(serving, count)  # is not counted
            before = serving.engine.stats()
            answers, rate = turn(serving, count)
            after = serving.engine.stats()
            found[str(count)] = {
                "rate": rate,
                "answers": answers,
                "proposed": after.proposed_tokens - before.proposed_tokens,
                "accepted": after.accepted_tokens - before.accepted_tokens,
            }
    return found


def turn(serving: Serving, users: int) -> tuple[list[list[int]], float]:
    """Return all answers, and the tokens per CPU second."""
    prompts = [
        serving.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        for question in QUESTIONS[:users]
    ]
    sampling: Any = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    cpu = time.process_time()
    answers = [
        serving.engine.submit(GenerationRequest(serving.tokenizer.encode(prompt), sampling, user=f"u{user}"))
        for user, prompt in enumerate(prompts)
    ]
    ids = [list(answer.result().token_ids) for answer in answers]
    return ids, users * NEW / (time.process_time() - cpu)


if __name__ == "__main__":
    print(json.dumps(main(*map(json.loads, sys.argv[1:]))))
