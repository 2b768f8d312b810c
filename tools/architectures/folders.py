"""Write a tiny random model of a class to a model folder: weights, config, tokenizer and processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.architectures.classes import Architecture
from tools.architectures.processors import save_processor
from tools.architectures.shrinking import EOS, PAD, VOCABULARY, tiny_config

MAX_PARAMETERS = 40_000_000
"""Maximum size of a tiny model. A class with a larger one is skipped; ``OVERRIDES`` can make it smaller."""
_NOISE = 0.05


class NotTriedError(Exception):
    """A check could not be run, for the reason in the message."""


def make_folder(architecture: Architecture, folder: Path) -> tuple[Any, str]:
    """Write the folder; return the model in memory, which is the same in every call, and why it has no processor.

    Raises:
        NotTriedError: If no tiny model of the class can be built.
        GymError: If gym-fed refuses the class.
    """
    import torch

    from gym_fed.base.modeling.config_checks import require_architecture
    from gym_fed.base.models import load_tokenizer, quiet_loading

    try:
        model_class = architecture.model_class()
        config = tiny_config(model_class.config_class)
        with torch.device("meta"):
            count = sum(value.numel() for value in model_class(config).parameters())
        if count > MAX_PARAMETERS:
            raise NotTriedError(f"no tiny config: it has {count:,} parameters")
        torch.manual_seed(0)
        model = model_class(config).to(torch.float32).eval()
    except NotTriedError:
        raise
    except Exception as error:
        raise NotTriedError(f"no tiny config: {first_line(error)}") from error
    config.architectures = [architecture.name]
    config.save_pretrained(folder)
    require_architecture(folder.name, folder)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:  # so that tokens differ clearly in the logits
                weight.add_(torch.randn_like(weight) * _NOISE)
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 0.0  # some classes do this whenever they are loaded
    model.tie_weights()
    ids = torch.tensor([[1, 2, 3, 4, 5, 6]])
    try:
        with torch.inference_mode():
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            first, second = (model(**inputs, use_cache=False).logits for _ in range(2))
    except Exception as error:
        raise NotTriedError(f"its own forward pass on text fails: {first_line(error)}") from error
    if not torch.equal(first, second):
        raise NotTriedError("its logits differ from one forward pass to the next")
    model.generation_config.update(eos_token_id=EOS, pad_token_id=PAD, do_sample=False)
    with quiet_loading():
        model.save_pretrained(folder)
        tokenizer = load_tokenizer("gym-nano")
        tokenizer.model_max_length = VOCABULARY
        tokenizer.save_pretrained(folder)
        if architecture.reads == "text":
            return model, ""
        return model, save_processor(architecture.model_types[0], tokenizer, folder)


def first_line(error: BaseException) -> str:
    """Return the name of an error's class and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}"[:300] if lines else type(error).__name__
