"""Checks of a config before a model is loaded: algorithm, tuning, optimiser, machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gym_fed.base.models import pick_device, resolve
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError, refuse_first
from gym_fed.core.registries import ALGORITHMS, OPTIMIZERS, TUNING
from gym_fed.data.chat_templates.choice import read_chat_template
from gym_fed.tracking.experiment import ready_tracker
from gym_fed.training.active_features import active_features

if TYPE_CHECKING:
    from gym_fed.evaluation.graders.base import Grader


def check_config(config: TrainingConfig, num_processes: int | None = None) -> None:
    """Refuse what this machine or installation cannot run; nothing is silently left out or replaced.

    Args:
        config: The config to check.
        num_processes: Number of processes of the run; by default the current number.

    Raises:
        GymError: ``CONFIG_INVALID``, ``MISSING_DEPENDENCY`` or ``USAGE`` naming the key and the remedy.
    """
    from gym_fed.training.model.adapters import check_adapters
    from gym_fed.training.model.quantization import check_quantization
    from gym_fed.training.model.reference import check_reference
    from gym_fed.training.private.checks import check_privacy
    from gym_fed.training.processes.group import world_size
    from gym_fed.training.processes.sharding import check_distributed
    from gym_fed.training.rows.batch_size import check_batch_size
    from gym_fed.training.rows.packing import check_packing
    from gym_fed.training.rows.tokenized import check_tokenized
    from gym_fed.training.run.spikes import check_spikes

    pick_device(config.device)
    if config.chat_template is not None:
        read_chat_template(config.chat_template)
    processes = world_size() if num_processes is None else num_processes
    check_distributed(config, processes)
    check_privacy(config, processes)
    ALGORITHMS.new(config.algorithm).check(config)
    check_packing(config)
    TUNING.new(config.finetuning).check(config)
    check_quantization(config)
    check_adapters(config)
    check_reference(config)
    OPTIMIZERS.new(config.optimizer).check(config)
    check_spikes(config)
    _check_delta(config)
    check_batch_size(config)
    _check_order(config)
    check_tokenized(config)
    for name in config.tracking:
        ready_tracker(name)  # refuses one whose package is missing
    for feature in active_features(config).values():
        feature.check(config)


def _check_order(config: TrainingConfig) -> None:
    orders_rows = ALGORITHMS.type_of(config.algorithm).orders_rows
    by_algorithm = f"shuffle: false, but {config.algorithm} orders its rows by itself"
    refuse_first(
        (
            not config.shuffle and config.privacy,
            "shuffle: false, but privacy draws every batch at random",
            "remove the key",
        ),
        (not config.shuffle and orders_rows, by_algorithm, "remove the key"),
    )


def require_training(config: TrainingConfig) -> None:
    """Refuse to train by a config that requests something else.

    Raises:
        GymError: ``USAGE`` naming what does that.
    """
    others = {
        "preprocess_only": "gym_fed.training.rows.preprocess.preprocess",
        "evaluate_only": "gym_fed.training.evaluating.evaluate",
    }
    for key, function in others.items():
        if getattr(config, key):
            raise GymError(
                ErrorCode.USAGE,
                f"{key}: is set, so there is nothing to train",
                f"call {function}(config), or set it to false",
            )


def _check_delta(config: TrainingConfig) -> None:
    """Refuse ``save_delta`` if the result is not a delta of a base that others have."""
    if config.save_delta is None:
        return
    strategy = config.distributed_strategy
    reasons: tuple[tuple[object, str], ...] = (
        (config.model is None, "the base has no name: give model"),
        (ALGORITHMS.type_of(config.algorithm).task_type != "CAUSAL_LM", "a reward model has another head"),
        (config.rope_scaling, "a delta does not hold rope_scaling"),
        (config.mixture_of_depths, "a delta does not hold the routers of mixture_of_depths"),
        (strategy != "ddp", f"under distributed.strategy {strategy} no process has the whole model"),
    )
    remedy = "remove it, and use gym delta encode after the run where that goes"
    refuse_first(*((applies, f"save_delta: {reason}", remedy) for applies, reason in reasons))


def check_graders(config: TrainingConfig, graders: Sequence[Grader]) -> None:
    """Refuse a run that needs rewards and has no graders, or two graders of one name."""
    names = [grader.name for grader in graders]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    refuse_first(
        (
            ALGORITHMS.new(config.algorithm).needs_graders and not names,
            f"graders: {config.algorithm} learns from rewards, and nothing gives any",
            "list at least one grader, such as: graders: [{grader: exact}]",
        ),
        (duplicate is not None, f"graders: two graders are called {duplicate!r}", "name them differently"),
    )


def check_inputs(config: TrainingConfig) -> None:
    """Refuse a config whose model, rows or graders are missing, or whose chat template does not accept the rows.

    Of every source the first thousand rows are read; none of the hub's.

    Raises:
        GymError: ``CONFIG_INVALID``, ``MODEL_NOT_FOUND``, ``FILE_NOT_FOUND`` or ``DATA_INVALID`` naming it.
    """
    from gym_fed.data.sources import source_rows
    from gym_fed.evaluation.graders._combined import build_graders
    from gym_fed.training.rows.template_check import check_template
    from gym_fed.training.vision.conversations import check_vision_keys

    if config.model is None and config.model_init is None:
        raise GymError(ErrorCode.CONFIG_INVALID, "model: not given", "name a model, or give model_init")
    resolve(str(config.model) if config.model_init is None else config.model_init.tokenizer)
    check_vision_keys(config)
    refuse_first((not config.data, "data: no rows to train on", "list at least one path or tasks entry"))
    for source in (*config.data, *config.eval_data):
        if source.hub is None and source.name is None and not check_template(config, source_rows(source)):
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"data: {source.path or source.dataset} holds no rows",
                "give at least one",
            )
    check_graders(config, build_graders(config.graders))
