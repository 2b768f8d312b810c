"""Grade answers with a trained reward model: one scalar per conversation (Ouyang et al. 2022, eq. 1)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from gym_fed.base.modeling.adapter_limits import bounded_tensors
from gym_fed.base.modeling.adapters import base_of, read_adapter
from gym_fed.base.modeling.loading import load_weights
from gym_fed.base.modeling.patterns import names_of, require_quick_patterns
from gym_fed.base.models import load_tokenizer, pick_device, quiet_loading, require_base_model, resolve
from gym_fed.config.train.graders import Device, GraderConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import read_object
from gym_fed.evaluation.graders.base import Grader, Sample


class RewardModelConfig(GraderConfig):
    """Config of the ``reward_model`` grader."""

    model: str
    """A finished run of ``algorithm: reward_model`` (full or adapter) or another sequence classifier with one label. A
    model or adapter folder with ``value_head.safetensors``, as LLaMA-Factory saves reward models, works too."""

    batch_size: int = Field(default=16, ge=1)
    max_length: int = Field(default=1024, ge=8)
    """Maximum number of tokens of a conversation; longer ones are truncated at the beginning."""

    device: Device = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"


class RewardModelGrader(Grader):
    """Renders prompt and answer with the model's chat template and returns the head's raw score."""

    Settings = RewardModelConfig
    config: RewardModelConfig

    def __init__(self, config: RewardModelConfig) -> None:
        super().__init__(config)
        self._folder = Path(resolve(config.model))
        self._device = pick_device(config.device)
        self._value_head = _has_value_head(self._folder)
        if not self._value_head:
            _require_scalar_head(self._folder, config.model)
        self._model: Any = None
        self._tokenizer: Any = None

    def setup(self) -> None:
        model = self._with_value_head() if self._value_head else self._classifier()
        if model.config.pad_token_id is None:  # the model locates the last token with it
            model.config.pad_token_id = self._tokenizer.pad_token_id
        self._tokenizer.padding_side, self._tokenizer.truncation_side = "right", "left"
        self._model = model.to(self._device).eval()

    def _with_value_head(self) -> Any:
        from gym_fed.evaluation.graders._value_head import load_value_head_model  # imports torch

        self._tokenizer = load_tokenizer(str(self._folder))
        return load_value_head_model(self.config.model, self._folder, self.config.dtype)

    def _classifier(self) -> Any:
        import torch
        from transformers import AutoModelForSequenceClassification

        with quiet_loading():
            dtype = getattr(torch, self.config.dtype)
            adapter = self._folder / "adapter_config.json"
            base = self._folder
            if adapter.is_file():
                require_base_model(self.config.model, self._folder)
                base = Path(resolve(base_of(read_adapter(self.config.model, self._folder))))
            model = load_weights(
                AutoModelForSequenceClassification,
                str(base),
                {"num_labels": 1, "dtype": dtype},
                name=self.config.model,
                headless=adapter.is_file(),  # the head is in the adapter
            )
            self._tokenizer = load_tokenizer(str(self._folder))
            if adapter.is_file():
                from peft import PeftModel

                own = read_adapter(self.config.model, self._folder)
                require_quick_patterns(own.config, names_of(model), str(adapter))
                with bounded_tensors(model, own.name):
                    model = PeftModel.from_pretrained(model, str(self._folder))
        return model

    def grade(self, samples: Sequence[Sample]) -> list[float]:
        import torch

        texts = [self._text(sample) for sample in samples]
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        scores = [0.0] * len(texts)
        with torch.inference_mode():
            for start in range(0, len(order), self.config.batch_size):
                chosen = order[start : start + self.config.batch_size]
                batch = self._tokenizer(
                    [texts[place] for place in chosen],
                    add_special_tokens=False,
                    padding=True,
                    truncation=True,
                    max_length=self.config.max_length,
                    return_tensors="pt",
                ).to(self._device)
                batch.pop("token_type_ids", None)
                for place, score in zip(chosen, self._model(**batch).logits[:, 0].tolist(), strict=True):
                    scores[place] = score
        return scores

    def teardown(self) -> None:
        self._model = self._tokenizer = None

    def _text(self, sample: Sample) -> str:
        """Render prompt and answer as in training."""
        if isinstance(sample.prompt, str):
            return sample.prompt + sample.completion + (self._tokenizer.eos_token or "")
        messages = [*sample.prompt, {"role": "assistant", "content": sample.completion}]
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False))


def _require_scalar_head(folder: Path, name: str) -> None:
    """Refuse a model without a trained scalar head.

    Raises:
        GymError: ``MODEL_INVALID``.
    """
    hint = "use a finished run of algorithm: reward_model"
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        task = read_object(adapter).get("task_type")
        if task != "SEQ_CLS":
            raise GymError(
                ErrorCode.MODEL_INVALID, f"{name} is an adapter for {task}, not a reward model", hint
            )
        return
    config = read_object(folder / "config.json")
    kinds = config.get("architectures") or []
    if not any(str(kind).endswith("ForSequenceClassification") for kind in kinds):
        raise GymError(ErrorCode.MODEL_INVALID, f"{name} is {', '.join(kinds)}, not a reward model", hint)
    labels = len(config.get("id2label") or {0: "", 1: ""})  # transformers omits its default of two labels
    if labels != 1:
        raise GymError(ErrorCode.MODEL_INVALID, f"{name} has {labels} labels; a reward model has 1", hint)


_HEAD = "value_head.safetensors"
_PICKLED = "value_head.bin"


def _has_value_head(folder: Path) -> bool:
    """Return True if ``folder`` contains a reward model with a value head.

    Raises:
        GymError: ``MODEL_INVALID`` for a pickled head.
    """
    if not (folder / _HEAD).is_file() and (folder / _PICKLED).is_file():
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{folder / _PICKLED} is a pickle, which is never loaded",
            f"save its tensors with safetensors.torch.save_file as {_HEAD}",
        )
    return (folder / _HEAD).is_file()
