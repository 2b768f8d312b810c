"""Evaluate a model on ``eval_data`` without training (``evaluate_only``)."""

from __future__ import annotations

import json
import math
import re
import tempfile
from pathlib import Path
from typing import Any

from gym_fed.base.models import pick_device, quiet_loading
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError, refuse_first
from gym_fed.core.files import write_atomically
from gym_fed.core.registries import ALGORITHMS, TUNING
from gym_fed.data.row_counts import RowCounts
from gym_fed.training.features.base import apply_features, features_during_run
from gym_fed.training.model.loading import load_for_training
from gym_fed.training.model.template_tokens import check_template_tokens, fit_to_template
from gym_fed.training.processes.sharding import is_placed
from gym_fed.training.run.checks import check_config
from gym_fed.training.run.job import Job
from gym_fed.training.trl_glue import restore_after_run

RESULTS = "eval_results.json"
_TIMED = re.compile(r"runtime|per_second|_time$|num_tokens$")


def evaluate(config: TrainingConfig) -> tuple[dict[str, float], RowCounts]:
    """Evaluate a model on ``eval_data`` and write the metrics into ``output_dir``.

    Returns:
        The metrics in ``eval_results.json``: those that a run with this config logs in an evaluation (``eval_loss``,
        ...), and ``eval_perplexity``. Also the row counts.

    Raises:
        GymError: ``CONFIG_INVALID`` without ``eval_data``, or for an algorithm whose metrics require training;
            ``FILE_EXISTS`` if ``output_dir`` already contains results; errors from ``Trainer.train``.
    """
    from transformers import PrinterCallback

    from gym_fed.training.rows.encode_part import encode_part
    from gym_fed.training.rows.run_rows import rows_of, rows_to_learn

    check_config(config)
    algorithm, tuning = ALGORITHMS.new(config.algorithm), TUNING.new(config.finetuning)
    _require_figures(config)
    file = config.output_dir / RESULTS
    if file.exists():
        raise GymError(ErrorCode.FILE_EXISTS, f"{file} already exists", "choose another output_dir")
    rows = rows_to_learn(config, rows_of(config, "eval_data"))
    check_template_tokens(config, rows)
    model, tokenizer = load_for_training(config)
    tokenizer = fit_to_template(model, tokenizer, config)
    model = apply_features(model, config)
    encoded, counts = encode_part(config, algorithm, tokenizer, rows)
    if not is_placed(model, config):
        model = model.to(pick_device(config.device))
    model = tuning.prepare(model, config).eval()
    with (
        quiet_loading(),
        restore_after_run(model),
        features_during_run(model, config),
        tempfile.TemporaryDirectory() as scratch,
    ):
        trainer = algorithm.build(Job(config, model, tokenizer, encoded, encoded, Path(scratch), []))
        trainer.remove_callback(PrinterCallback)
        metrics = trainer.evaluate()
    names = [name for name in metrics if not _TIMED.search(name) and name != "epoch"]
    figures = {name: float(metrics[name]) for name in names}
    if algorithm.uses_model_loss:
        figures["eval_perplexity"] = math.exp(min(figures["eval_loss"], 700.0))
    file.parent.mkdir(parents=True, exist_ok=True)
    written: dict[str, Any] = {**figures, "rows": counts.as_dict()}
    write_atomically(file, f"{json.dumps(written, indent=4)}\n".encode())
    return figures, counts


def _require_figures(config: TrainingConfig) -> None:
    kind = ALGORITHMS.type_of(config.algorithm)
    same = f"{config.algorithm} compares a model with its initial state, but here the two are the same"
    unmeasured = kind.task_type != "CAUSAL_LM" or not kind.keeps_encoded
    refuse_first(
        (not config.eval_data, "there are no rows to evaluate on", "add eval_data"),
        (kind.uses_reference, same),
        (unmeasured, f"{config.algorithm} has no metrics for an untrained model"),
        prefix="evaluate_only: ",
        remedy="use algorithm: sft",
    )
