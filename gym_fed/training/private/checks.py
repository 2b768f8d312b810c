"""Refusals of a private run: every setting that would make epsilon wrong."""

from __future__ import annotations

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import refuse_first
from gym_fed.core.registries import ALGORITHMS, OPTIMIZERS, TUNING
from gym_fed.core.requirements import require_package
from gym_fed.training.active_features import active_features


def check_privacy(config: TrainingConfig, num_processes: int) -> None:
    """Refuse what is not accounted for, before anything is loaded. Without ``privacy`` nothing is refused.

    Raises:
        GymError: ``CONFIG_INVALID`` with the reason and the remedy; ``MISSING_DEPENDENCY``.
    """
    if config.privacy is None:
        return
    require_package("opacus", "privacy", "privacy")
    require_package("dp_accounting", "privacy", "privacy")
    algorithm = ALGORITHMS.type_of(config.algorithm)
    features = [name for name, feature in active_features(config).items() if not feature.per_example]
    joins = config.packing or (config.packing is None and algorithm.packing_default)
    default = TrainingConfig.model_fields["max_grad_norm"].default
    refusals: list[tuple[object, str, str]] = [
        (
            not algorithm.per_example,
            f"algorithm: {config.algorithm} is not accounted for (its losses may look at several rows at once)",
            "use sft or pretrain",
        ),
        (
            not TUNING.type_of(config.finetuning).per_example,
            f"finetuning: gradients of single examples are not tried with {config.finetuning}",
            "use full, freeze or lora",
        ),
        (
            config.lora is not None and config.lora.use_dora,
            "lora.use_dora: Opacus has no gradients of single examples for its magnitudes",
            "set it to false",
        ),
        (
            not OPTIMIZERS.new(config.optimizer).per_example,
            f"optimizer: {config.optimizer} may need more than noised gradients",
            "use one such as adamw or sgd",
        ),
        (
            joins,
            "packing: joins rows, so that clipping would no longer bound what one of them does",
            "set packing: false",
        ),
        (
            any(source.weight != 1 for source in config.data),
            "data.weight: a row that is repeated is several examples, and a drawn share depends on all the rows",
            "give every source weight 1",
        ),
        (
            any(source.dataset or (source.num_examples and not source.tasks) for source in config.data),
            "data.num_examples, data.dataset: which rows are taken depends on the rows beside them",
            "put the rows that are meant into a file, and name it in path",
        ),
        (
            config.eval_split,
            "eval_split: which rows are held out depends on all of them",
            "hold rows out in a file of their own, eval_data",
        ),
        (config.group_by_length, "group_by_length: batches would depend on the rows", "remove it"),
        (
            config.max_grad_norm != default,
            "max_grad_norm: of the top level clips whole batches, which bounds no single example",
            "set privacy.max_grad_norm",
        ),
        (
            config.loss_spikes,
            "loss_spikes: looks at the training loss, which is not noised",
            "remove it; early_stopping on eval_data is allowed",
        ),
        (config.auto_batch_size, "auto_batch_size: tries rows out", "give per_device_train_batch_size"),
        (features, f"{', '.join(features)}: not tried with gradients of single examples", "remove it"),
        (config.quantization, "quantization: not tried with gradients of single examples", "remove it"),
        (
            config.dtype != "float32",
            f"dtype: {config.dtype} rounds gradients, so that clipping is not exact",
            "set dtype: float32",
        ),
        (
            num_processes > 1,
            f"{num_processes} processes: each would noise its own part",
            "train in one process; --nproc 1",
        ),
    ]
    refuse_first(*((applies, f"{why}, and privacy is set", remedy) for applies, why, remedy in refusals))
