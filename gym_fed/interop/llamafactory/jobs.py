"""The purpose of a LLaMA-Factory file: training, predicting, evaluating, preprocessing, merging or inference."""

from __future__ import annotations

from typing import Any

from gym_fed.config.parsed import Job
from gym_fed.interop.llamafactory.translation import is_version_1

_TRAINS_ONLY = ("stage", "finetuning_type", "dataset", "do_train", "do_eval", "do_predict", "cutoff_len")


def job_of(given: dict[str, Any]) -> Job:
    """The job of one file's values.

    There the command decides (``train``, ``export``, ``chat``); their files for one command have keys of its own.
    Where a file trains and then evaluates or predicts, it trains.
    """
    if is_version_1(given):
        peft = given.get("peft_config")
        exports = isinstance(peft, dict) and peft.get("export_dir") is not None
        if exports and not given.get("train_dataset"):
            return "export"
        return "train" if given.get("train_dataset") else "inference"
    if given.get("export_dir") is not None:
        return "export"
    if given.get("do_train"):
        return "train"
    if given.get("do_predict"):
        return "predict"
    if given.get("do_eval"):
        return "evaluate"
    if given.get("tokenized_path") is not None:
        return "preprocess"
    return "inference" if not any(given.get(key) is not None for key in _TRAINS_ONLY) else "train"
