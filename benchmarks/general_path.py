"""Speed of the general path of serving: models with recurrent state or other attention, beside a packed Llama.

    python benchmarks/general_path.py [--quick] [--json] [--plot FILE]

Models of the same size with random weights answer 1 and 8 users with prompts of equal length. The peer is transformers'
greedy generate of the same model, with the users as one batch. Both run on one thread, in turns. Times are CPU time of
the process, which excludes other processes on the machine. The table has the median, minimum and maximum of the turns
in tokens per second, including prompts. The script asserts which path ran.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from _peer import spread
from _report import Report, options, show

from gym_fed.serving.forward.chunk import Chunk
from gym_fed.serving.forward.multi_variant import MultiVariantModel

SIZES: dict[str, Any] = {
    "vocab_size": 16_384,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
QUICK = {
    **SIZES,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
}
PATHS = {"Llama": "decoder", "StableLm": "general", "Lfm2": "general", "Qwen3Next": "general"}
USERS, PROMPT, TOKENS = (1, 8), 64, 32
TURNS, QUICK_TURNS = 5, 3


def settings(kind: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes with the settings of a model class; in hybrids, every fourth layer is attention."""
    layers = range(1, sizes["num_hidden_layers"] + 1)
    other = {"Lfm2": "conv", "Qwen3Next": "linear_attention"}.get(kind)
    if other is None:
        return sizes
    kinds = ["full_attention" if at % 4 == 0 else other for at in layers]
    more = {"block_auto_adjust_ff_dim": False} if kind == "Lfm2" else _LINEAR
    return {**sizes, **more, "layer_types": kinds}


_LINEAR = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
}


def main() -> None:
    arguments = options(__doc__).parse_args()
    torch.set_num_threads(1)
    report, rows = Report("general_path", peer="generate"), []
    for kind, path in PATHS.items():
        model = random_model(kind, QUICK if arguments.quick else SIZES)
        for users in USERS:
            ours, theirs = measured(model, path, users, QUICK_TURNS if arguments.quick else TURNS)
            what = f"{kind}, {users} user{'s' * (users > 1)}"
            rows.append([what, path, spread(ours, 1), spread(theirs, 1)])
            report.compare(
                what, statistics.median(ours), statistics.median(theirs), unit="tokens/s", better="higher"
            )
    show("tokens per second", ("", "path", "ours", "generate"), rows, "one thread, CPU time, float32")
    report.finish(arguments)


def random_model(kind: str, sizes: dict[str, Any]) -> Any:
    """Return a model with random weights, since times do not depend on their values."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**settings(kind, sizes))
    model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    model.generation_config.update(eos_token_id=None, pad_token_id=0, bos_token_id=1)
    return model


def measured(model: Any, path: str, users: int, turns: int) -> tuple[list[float], list[float]]:
    """Return the tokens per second of our steps and of generate, one figure per turn."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(2, 1000, (users, PROMPT), generator=generator)
    ours, theirs = [], []
    for turn in range(turns + 1):
        with MultiVariantModel(model) as served:
            if served.forward != path:
                raise RuntimeError(f"{served.described}, not by {path}")
            started = time.process_time()
            found = answered(served, prompts.tolist())
            seconds = time.process_time() - started
        started = time.process_time()
        with torch.inference_mode():
            wanted = model.generate(prompts, max_new_tokens=TOKENS, do_sample=False)[:, PROMPT:].tolist()
        generated = time.process_time() - started
        if found != wanted:
            raise RuntimeError("the answers are not those of generate")
        if turn:  # the first turn is a warm-up
            ours.append(users * TOKENS / seconds)
            theirs.append(users * TOKENS / generated)
    return ours, theirs


def answered(served: MultiVariantModel, prompts: list[list[int]]) -> list[list[int]]:
    """Return the greedy answers of all users, computed step by step as in the engine."""
    caches = [served.new_cache() for _ in prompts]
    tokens = prompts
    answers: list[list[int]] = [[] for _ in prompts]
    for _ in range(TOKENS):
        logits = served.step([Chunk(ids, cache) for ids, cache in zip(tokens, caches, strict=True)])
        tokens = [[int(row.argmax())] for row in logits]
        for answer, ids in zip(answers, tokens, strict=True):
            answer += ids
    return answers


if __name__ == "__main__":
    main()
