"""What two processes find out about split rows and cut models, in one start (``test_split_rows.py``)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen3Config,
)

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import GymError
from gym_fed.training.model.output_head import add_output_head
from gym_fed.training.processes import group
from gym_fed.training.processes.pipeline import cut_into_stages, pipeline_of
from gym_fed.training.processes.sequence_parallel import (
    heads_of_tokens,
    require_splittable,
    sequence_parallel,
    tokens_of_heads,
)
from gym_fed.training.processes.sharding import settings_of
from gym_fed.training.processes.stages import ModelStages

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SIZES, num_key_value_heads=2),
    "fewer key heads": lambda: Qwen3Config(**SIZES, num_key_value_heads=1),
    "window": lambda: MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=3),
    "mixed windows": lambda: Qwen3Config(
        **SIZES, num_key_value_heads=2, use_sliding_window=True, sliding_window=3, max_window_layers=1
    ),
    "learned positions": lambda: GPT2Config(
        vocab_size=61,
        n_embd=16,
        n_layer=2,
        n_head=4,
        n_positions=64,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    ),
}
REFUSED: dict[str, Callable[[], Any]] = {
    "odd heads": lambda: LlamaConfig(
        **{**SIZES, "hidden_size": 12, "num_attention_heads": 3, "num_key_value_heads": 3}
    ),
    "soft cap": lambda: Gemma2Config(**SIZES, num_key_value_heads=2),
    "recurrent": lambda: MambaConfig(vocab_size=61, hidden_size=16, num_hidden_layers=2, state_size=4),
    "sinks": lambda: AutoConfig.for_model(
        "gpt_oss", **SIZES, num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1
    ),
}


def config_of(**distributed: Any) -> TrainingConfig:
    """A config that splits rows over both processes."""
    settings = {"strategy": "sequence_parallel", **distributed}
    return TrainingConfig(model="gym-nano", gradient_accumulation_steps=2, distributed=settings)


def model_of(name: str, models: dict[str, Callable[[], Any]]) -> Any:
    """A tiny model, the same in both processes."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(models[name]())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def rows(length: int) -> dict[str, dict[str, torch.Tensor]]:
    """Batches of two rows: whole, padded on either side, and packed."""
    ids = torch.randint(3, 61, (2, length), generator=torch.Generator().manual_seed(1))
    right, left = torch.ones_like(ids), torch.ones_like(ids)
    right[1, -4:], left[0, :3] = 0, 0
    cut = length // 3
    packed = torch.cat((torch.arange(cut), torch.arange(length - cut)))[None]
    return {
        "whole": {"input_ids": ids},
        "right": {"input_ids": ids, "attention_mask": right},
        "left": {"input_ids": ids, "attention_mask": left},
        "packed": {"input_ids": ids[:1], "position_ids": packed},
    }


def loss_and_gradients(
    model: Any, batch: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities of each token, and the gradients of their sum, averaged over the processes as DDP does."""
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    labels = batch["input_ids"].masked_fill(mask == 0, -100)
    model.zero_grad()
    found = model(**batch, labels=labels, fused_lm_head=True, use_cache=False).log_probs
    found.sum().backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            gradients[name] = parameter.grad / dist.get_world_size()
    return found.detach(), gradients


def compared(name: str) -> dict[str, float]:
    """The largest difference of log-probabilities, and of gradients, by kind of batch."""
    config, model = config_of(), model_of(name, MODELS)
    add_output_head(model)
    distances = {}
    for length in (12, 13):  # an odd length is padded
        for kind, batch in rows(length).items():
            expected, wanted = loss_and_gradients(model, batch)
            with sequence_parallel(model, config) as splitter:
                assert splitter is not None
                found, gradients = loss_and_gradients(model, batch)
                assert splitter.calls == model.config.num_hidden_layers
            far = max(float((gradients[key] - wanted[key]).abs().max()) for key in wanted)
            distances[f"{kind} {length}"] = max(float((found - expected).abs().max()), far)
    assert model.config._attn_implementation == "sdpa"
    return distances


def generated() -> bool:
    """Whether answers with a cache are those of a model whose rows are not split, and later rows are split again."""
    model, config = model_of("llama", MODELS).eval(), config_of()
    batch = rows(8)["left"]
    expected = model.generate(**batch, max_new_tokens=4, do_sample=False)
    whole = model(**batch, use_cache=False).logits
    with sequence_parallel(model, config):
        found = model.generate(**batch, max_new_tokens=4, do_sample=False)
        parts = model(**batch, use_cache=False).logits
    real = batch["attention_mask"].bool()
    return bool((found == expected).all()) and torch.allclose(parts[real], whole[real], atol=1e-5)


def exchanged() -> bool:
    """Whether heads and tokens come back as they were, and each process has all tokens of its heads."""
    states = torch.arange(2 * 4 * 6 * 3.0).view(2, 4, 6, 3)
    rank = dist.get_rank()
    own = states[:, :, rank * 3 : rank * 3 + 3]
    heads = heads_of_tokens(own, dist.group.WORLD)
    back = tokens_of_heads(heads, dist.group.WORLD)
    return torch.equal(heads, states[:, rank * 2 : rank * 2 + 2]) and torch.equal(back, own)


def refusal(check: Callable[[], Any]) -> str:
    """The message with which ``check`` refuses; empty if it does not."""
    try:
        check()
    except GymError as error:
        return f"{error.message} ({error.hint})"
    return ""


def cut(folder: Path) -> dict[str, Any]:
    """What the processes keep of a cut model, and what a checkpoint of it holds."""
    config = config_of(strategy="pipeline_parallel")
    model = model_of("fewer key heads", MODELS)
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    own = cut_into_stages(model, config, torch.device("cpu"))
    pipeline = pipeline_of(own)
    assert pipeline is not None
    collected = pipeline.stages.whole_weights()
    kept = sum(p.numel() for p in own.parameters())
    return {
        "kept": kept / sum(value.numel() for value in whole.values()),
        "collected": all(torch.equal(collected[name], whole[name]) for name in collected),
        "number": len(collected),
        "outside": refusal(lambda: own(input_ids=torch.ones(1, 4, dtype=torch.long))),
    }


def look(folder: Path) -> None:
    """Write what this process finds to ``found-RANK.json``."""
    config, stages = config_of(), config_of(strategy="pipeline_parallel")
    group.start(settings_of(config), torch.device("cpu"))
    frozen = model_of("llama", MODELS)
    frozen.requires_grad_(False)
    found = {
        "exchanged": exchanged(),
        "compared": {name: compared(name) for name in MODELS},
        "generated": generated(),
        "refused": {
            name: refusal(lambda name=name: require_splittable(model_of(name, REFUSED), config))
            for name in REFUSED
        },
        "uncut": refusal(lambda: ModelStages(model_of("learned positions", MODELS), stages)),
        "untrained": refusal(lambda: ModelStages(frozen, stages)),
        "cut": cut(folder),
    }
    (folder / f"found-{os.environ['RANK']}.json").write_text(json.dumps(found))
