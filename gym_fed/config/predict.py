"""The schema of `gym predict`'s YAML: a model, rows to answer, and sampling."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from gym_fed.config.schema.base import LocalPath, StrictModel
from gym_fed.config.train.compute import Dtype
from gym_fed.config.train.data_source import DataConfig

_SAMPLING_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}


class PredictConfig(StrictModel):
    """The config of `gym predict`: model, rows and sampling, with the sampling names of transformers' ``generate``."""

    model: str
    """Model: ``gym-nano``, a model folder, a run folder, or a Hugging Face name in the local cache."""

    adapter: str | Annotated[list[str], Field(min_length=1)] | None = None
    """Adapters to merge into ``model``, in this order."""

    eval_data: list[DataConfig] = Field(min_length=1)
    """Rows that end with an answer; the model gets the part before it."""

    output_dir: LocalPath = Path("runs/predict")
    """Folder for ``generated_predictions.jsonl`` and ``predict_results.json``."""

    chat_template: str | None = Field(default=None, min_length=1)
    """Chat template instead of the model's, as in a training config."""

    enable_thinking: bool | None = None
    """Value for the chat template of models with a thinking mode (Qwen3); None = the template's default."""

    max_length: int = Field(default=1024, ge=2)
    """Maximum number of tokens per prompt; longer rows are dropped and counted."""

    max_new_tokens: int = Field(default=256, ge=1)
    """Maximum number of tokens per answer."""

    do_sample: bool = False
    """Sample answers with ``seed`` instead of decoding greedily."""

    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """Sample from the N most likely tokens; 0 = all."""

    repetition_penalty: float = Field(default=1.0, gt=0)
    num_beams: int = Field(default=1, ge=1)
    skip_special_tokens: bool = True
    """Omit special tokens from the saved and compared answers."""

    batch_size: int = Field(default=8, ge=1)
    """Number of prompts per batch."""

    seed: int = 0
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    dtype: Dtype = "float32"
    num_threads: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _validate_sampling(self) -> PredictConfig:
        for key, default in _SAMPLING_DEFAULTS.items():
            if not self.do_sample and getattr(self, key) != default:
                raise ValueError(f"{key} applies only with do_sample: true")
        return self
