"""Translate ``stage`` and its settings to an algorithm and its section."""

from __future__ import annotations

from typing import Any

from gym_fed.config.parsed import Job
from gym_fed.interop.llamafactory.translation import Translator, names

_GROUPS = ("grpo", "gspo", "rloo")
_ALGORITHMS = {
    **{"pt": "pretrain", "sft": "sft", "rm": "reward_model", "ppo": "ppo", "dpo": "dpo", "kto": "kto"},
    **{name: name for name in _GROUPS},
}
"""Algorithms by stage. The stages of the last line exist only in gym-fed."""
_REWARD_MODELS = ("lora", "oft", "full")
_DPO_LOSSES = ("sigmoid", "hinge", "ipo")
_ALL = (
    *("pref_loss", "pref_beta", "pref_ftx", "simpo_gamma", "dpo_label_smoothing", "ld_alpha"),
    *("kto_chosen_weight", "kto_rejected_weight", "reward_model", "reward_model_type", "ppo_epochs"),
    *(
        "num_generations",
        "ppo_buffer_size",
        "ppo_target",
        "temperature",
        "top_p",
        "top_k",
        "num_beams",
        "max_new_tokens",
    ),
    *(
        "do_sample",
        "repetition_penalty",
        "max_length",
        "length_penalty",
        "predict_with_generate",
        "do_predict",
    ),
)


def translate_stage(translator: Translator, job: Job) -> str:
    """Write ``algorithm`` and its section; return the algorithm."""
    stage = str(translator.take("stage", "sft"))
    translator.take("do_train")
    if job == "evaluate":
        translator.put("evaluate_only", True, "do_eval")
        translator.take("do_eval")
    if job == "preprocess":
        translator.put("preprocess_only", True, "tokenized_path")
        translator.note("tokenized_path", "without do_train, rows are encoded but nothing is trained")
    algorithm = _ALGORITHMS.get(stage)
    if algorithm is None:
        translator.lose("stage", f"{stage!r} is not one of {', '.join(_ALGORITHMS)}")
        return stage
    if algorithm == "dpo":
        algorithm = translate_preference(translator)
    elif algorithm == "sft":
        _supervised(translator)
    elif algorithm == "kto":
        translator.move("pref_beta", "kto.beta", 0.1)
        translator.move("kto_chosen_weight", "kto.desirable_weight")
        translator.move("kto_rejected_weight", "kto.undesirable_weight")
        translator.lose_if("pref_ftx", "kto has no supervised loss term", harmless=(0, 0.0))
    elif algorithm == "ppo":
        _ppo(translator)
    elif algorithm in _GROUPS:
        _group(translator, algorithm)
    translator.put("algorithm", algorithm, "stage")
    unread = f"not used by stage {stage}"
    for key in _ALL:
        if key in translator.untaken() and translator.has(key):
            translator.take(key)
            translator.note(key, unread)
        else:
            translator.take(key)
    return algorithm


def _supervised(translator: Translator) -> None:
    """Write the loss settings of sft."""
    for loss in ("asft", "eaft", "dft"):  # LLaMA-Factory uses the last one that is set
        if translator.take(f"use_{loss}_loss", False):
            translator.put("sft.loss_type", loss, f"use_{loss}_loss")
    for loss in ("asft", "eaft"):
        alpha = translator.take(f"{loss}_alpha")
        if alpha is not None and translator.result.values.get("sft", {}).get("loss_type") == loss:
            translator.put(f"sft.{loss}_alpha", alpha, f"{loss}_alpha")
    if smoothing := translator.take("label_smoothing_factor", 0):
        translator.put("sft.label_smoothing", smoothing, "label_smoothing_factor")


def translate_references(translator: Translator) -> None:
    """Write the initial adapter and the reference model."""
    if (adapters := translator.take("adapter_name_or_path")) is not None:
        translator.put("adapter", names(adapters), "adapter_name_or_path")
        if translator.take("create_new_adapter", False):
            translator.put("new_adapter", True, "create_new_adapter")
    translator.take("create_new_adapter")
    translator.move("ref_model", "reference_model")
    if (adapters := translator.take("ref_model_adapters")) is not None:
        translator.put("reference_adapter", names(adapters), "ref_model_adapters")


def translate_preference(translator: Translator) -> str:
    """Return dpo, orpo or simpo according to ``pref_loss``, and write its section."""
    loss = str(translator.take("pref_loss", "sigmoid"))
    ftx = translator.take("pref_ftx", 0.0)
    if loss in ("orpo", "simpo"):
        translator.move("pref_beta", f"{loss}.beta", 0.1)
        if loss == "simpo":
            translator.move("simpo_gamma", "simpo.gamma", 0.5)
        if ftx:
            translator.lose("pref_ftx", f"{loss} has no additional supervised loss term")
        return loss
    translator.move("pref_beta", "dpo.beta", 0.1)
    if loss not in _DPO_LOSSES:
        translator.lose("pref_loss", f"{loss!r} is not one of {', '.join((*_DPO_LOSSES, 'orpo', 'simpo'))}")
    else:
        translator.put("dpo.loss_type", [loss, "sft"] if ftx else [loss], "pref_loss")
    if ftx:
        translator.put("dpo.loss_weights", [1.0, ftx], "pref_ftx")
    translator.lose_if("dpo_label_smoothing", "the sigmoid loss has no label smoothing", harmless=(0, 0.0))
    translator.move("ld_alpha", "dpo.ld_alpha")
    return "dpo"


def _reward(translator: Translator) -> None:
    reward_model_type = str(translator.take("reward_model_type", "lora"))
    model = translator.take("reward_model")
    if reward_model_type == "api":
        translator.lose("reward_model_type", "use our grader remote, which has a different wire format")
    elif reward_model_type not in _REWARD_MODELS:
        translator.lose(
            "reward_model_type", f"{reward_model_type!r} is not one of {', '.join(_REWARD_MODELS)}, api"
        )
    elif model is not None:
        translator.put("graders", [{"grader": "reward_model", "model": str(model)}], "reward_model")


def _group(translator: Translator, algorithm: str) -> None:
    """Write the settings of group-based algorithms, which LLaMA-Factory lacks; gym-fed's defaults apply."""
    _reward(translator)
    for key, ours in (
        ("num_generations", "num_generations"),
        ("pref_beta", "beta"),
        ("temperature", "temperature"),
        ("top_p", "top_p"),
        ("top_k", "top_k"),
        ("max_new_tokens", "max_completion_length"),
        ("repetition_penalty", "repetition_penalty"),
    ):
        translator.move(key, f"{algorithm}.{ours}")


def _ppo(translator: Translator) -> None:
    _reward(translator)
    translator.move("ppo_epochs", "ppo.num_iterations", 4)
    buffer = translator.take("ppo_buffer_size", 1)
    if buffer != 1:
        steps: Any = translator.take("gradient_accumulation_steps", 1)
        translator.put("gradient_accumulation_steps", steps, "gradient_accumulation_steps")
        translator.put("ppo.steps_per_generation", steps * buffer, "ppo_buffer_size")
    # LLaMA-Factory's generation defaults.
    translator.move("temperature", "ppo.temperature", 0.95)
    translator.move("top_p", "ppo.top_p", 0.7)
    translator.move("top_k", "ppo.top_k", 50)
    translator.move("max_new_tokens", "ppo.max_completion_length", 1024)
    translator.move("repetition_penalty", "ppo.repetition_penalty")
    translator.lose_if("num_beams", "answers are sampled, without beam search", harmless=(1,))
    translator.lose_if("do_sample", "answers are always sampled", harmless=(True,))
    translator.put("ppo.beta", 0.2)
    translator.take("ppo_target")
    translator.note("stage", "ppo: the KL weight is fixed at 0.2; LLaMA-Factory adapts it towards ppo_target")
