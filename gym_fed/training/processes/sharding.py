"""Check the strategies that distribute a run over processes, and translate them to arguments for transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gym_fed.config.train.compute import DistributedSettings
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import refuse_first
from gym_fed.core.registries import ALGORITHMS, OPTIMIZERS, TUNING
from gym_fed.core.requirements import require_package
from gym_fed.core.text import counted
from gym_fed.training.processes.group import world_size

if TYPE_CHECKING:
    from torch import Tensor

_AT_LOADING = ("fsdp2", "tensor_parallel")
_WHOLE_ROW_FEATURES = (
    *("shift_attention", "mixture_of_depths", "neftune_noise_alpha"),
    *("torch_compile", "liger", "unsloth"),
)


def settings_of(config: TrainingConfig) -> DistributedSettings:
    """Return the ``distributed`` section, or its defaults."""
    return config.distributed or DistributedSettings()


def is_sharded_at_loading(config: TrainingConfig) -> bool:
    """Return True if ``from_pretrained`` splits the model, so that its parameters are DTensors."""
    return world_size() > 1 and settings_of(config).strategy in _AT_LOADING


def sequence_parallel_size(config: TrainingConfig) -> int:
    """Return the number of processes that share the tokens of a row; 1 unless rows are split."""
    settings = settings_of(config)
    if settings.strategy != "sequence_parallel":
        return 1
    return settings.sequence_parallel_size or world_size()


def same_outputs(outputs: Tensor, expected: Tensor, dtype: Any) -> bool:
    """Return True if float32 outputs of a distributed model differ only by the rounding of its ``dtype``."""
    distance = float((outputs - expected).norm() / expected.norm().clamp(min=1e-12))
    return distance <= (1e-3 if str(dtype) == "torch.float32" else 5e-2)


def check_distributed(config: TrainingConfig, num_processes: int) -> None:
    """Refuse a strategy that does not work on this machine or with this config."""
    settings = settings_of(config)
    optimizer = OPTIMIZERS.new(config.optimizer)
    key = f"distributed.strategy: {settings.strategy}"
    required = settings.world_size
    several = num_processes > 1 and optimizer.of_one_process
    one_process = f"optimizer: {config.optimizer} {optimizer.of_one_process}"
    alone = num_processes == 1 and settings.strategy != "ddp"
    refuse_first(
        (
            required not in (None, num_processes),
            f"distributed.world_size: the run needs {required}, but has {num_processes}",
            f"gym train --nproc {required} ..., or --nnodes N on each of several machines",
        ),
        (several, one_process, "use one process, or another optimizer"),
        (alone, f"{key} needs several processes, but there is only one", "gym train --nproc 2 ..."),
    )
    if settings.strategy == "ddp":
        return
    if settings.strategy == "sequence_parallel":
        _check_sequence_parallel(config, num_processes)
        return
    if settings.strategy == "pipeline_parallel":
        _check_pipeline(config, num_processes)
        return
    by_deepspeed = settings.strategy == "deepspeed"
    if by_deepspeed:
        require_package("deepspeed", key, "dist")
    splits_weights = not by_deepspeed or settings.zero_stage == 3
    rolls_back = config.loss_spikes is not None and config.loss_spikes.rollback
    refuse_first(
        (
            by_deepspeed and rolls_back,
            " cannot return to a checkpoint within a run, as loss_spikes.rollback does",
            "set loss_spikes.rollback: false, or use ddp or fsdp2",
        ),
        (
            splits_weights and not ALGORITHMS.type_of(config.algorithm).shards,
            f" splits the model's weights, which {config.algorithm} does not support here",
            lambda: f"use ddp, or one of {', '.join(ALGORITHMS.own_with('shards'))}",
        ),
        (
            not optimizer.shards,
            f" splits the trained weights, which {config.optimizer} does not support here",
            lambda: f"use ddp, or one of {', '.join(OPTIMIZERS.own_with('shards'))}",
        ),
        (config.quantization, " cannot be combined with quantization", "use ddp, or remove quantization"),
        (
            settings.strategy == "tensor_parallel" and TUNING.new(config.finetuning).is_adapter,
            f" splits the layers, but PEFT's layers for {config.finetuning} expect whole ones",
            "use ddp or fsdp2, or finetuning: full",
        ),
        (
            settings.strategy in _AT_LOADING and config.model_init,
            " shards a model while loading it, but model_init loads none",
            "save the new model first (gym train with one step), and set model to its folder",
        ),
        prefix=key,
    )


def _check_sequence_parallel(config: TrainingConfig, num_processes: int) -> None:
    """Refuse features that need whole rows in the decoder, or that replace its attention."""
    settings, key = settings_of(config), "distributed.strategy: sequence_parallel"
    size = settings.sequence_parallel_size or num_processes
    conflict = next((name for name in _WHOLE_ROW_FEATURES if getattr(config, name)), None)
    refuse_first(
        (
            num_processes % size,
            f".sequence_parallel_size: {counted(num_processes, 'process')} are not a multiple of {size}",
            "change --nproc, or remove the key",
        ),
        (
            not ALGORITHMS.type_of(config.algorithm).splits_rows,
            f" splits the tokens of a row, which {config.algorithm} does not support here",
            lambda: f"use ddp, or one of {', '.join(ALGORITHMS.own_with('splits_rows'))}",
        ),
        (
            config.attention not in ("auto", "sdpa"),
            f" uses sdpa, but attention is {config.attention}",
            "remove attention",
        ),
        (conflict, f" cannot be combined with {conflict}", f"remove {conflict}, or use ddp"),
        prefix=key if num_processes % size == 0 else "distributed",
    )


def _check_pipeline(config: TrainingConfig, num_processes: int) -> None:
    """Refuse settings that need the whole model, or several passes through it."""
    conflicts = (*_WHOLE_ROW_FEATURES, "quantization", "base_dtype")
    conflict = next((name for name in conflicts if getattr(config, name)), None)
    tuning = TUNING.type_of(config.finetuning)
    steps = config.gradient_accumulation_steps
    rolls_back = config.loss_spikes is not None and config.loss_spikes.rollback
    reference = getattr(config.chosen_sections().get(config.algorithm), "precompute_ref_log_probs", None)
    refuse_first(
        (
            not ALGORITHMS.type_of(config.algorithm).pipelines,
            f" passes a batch through the model once, which {config.algorithm} does not support here",
            lambda: f"use ddp, or one of {', '.join(ALGORITHMS.own_with('pipelines'))}",
        ),
        (
            steps < num_processes,
            f" needs as many micro-batches as processes ({num_processes}), but gradient_accumulation_steps is {steps}",
            f"set gradient_accumulation_steps: {num_processes} or more, and a smaller per_device_train_batch_size",
        ),
        (
            not tuning.pipelines,
            f" is not tested with finetuning: {config.finetuning}",
            lambda: f"use one of {', '.join(TUNING.own_with('pipelines'))}",
        ),
        (
            not OPTIMIZERS.new(config.optimizer).shards,
            f" gives each process different weights, which {config.optimizer} does not support here",
            lambda: f"use one of {', '.join(OPTIMIZERS.own_with('shards'))}",
        ),
        (conflict, f" cannot be combined with {conflict}", f"remove {conflict}, or use ddp or fsdp2"),
        (
            "float16" in (config.dtype, config.loaded_dtype) or config.mixed_precision == "fp16",
            " does not scale gradients, which fp16 needs",
            "use bfloat16 or bf16",
        ),
        (rolls_back, " cannot return to a checkpoint within a run", "set loss_spikes.rollback: false"),
        (
            reference is False,
            f" computes the reference before the first step, but {config.algorithm}.precompute_ref_log_probs is false",
            "remove it",
        ),
        prefix="distributed.strategy: pipeline_parallel",
    )


def loading_arguments(config: TrainingConfig) -> dict[str, Any]:
    """Return keyword arguments for ``from_pretrained``; empty unless the model is sharded while it is loaded."""
    if not is_sharded_at_loading(config):
        return {}
    from transformers.distributed import DistributedConfig

    settings, size = settings_of(config), world_size()
    if settings.strategy == "tensor_parallel":
        return {"distributed_config": DistributedConfig(tp_size=size, tp_plan="auto")}
    return {"distributed_config": DistributedConfig(fsdp_size=size, fsdp_cpu_offload=settings.cpu_offload)}


def is_placed(model: Any, config: TrainingConfig) -> bool:
    """Return True if the model must not be moved: loading has placed it, or it will be cut into stages."""
    is_cut_later = world_size() > 1 and settings_of(config).strategy == "pipeline_parallel"
    return is_sharded_at_loading(config) or is_cut_later or bool(getattr(model, "is_quantized", False))


def deepspeed_loading(config: TrainingConfig) -> Any:
    """Make ZeRO-3 split models while loading, as long as the returned object exists; None for other strategies."""
    settings = settings_of(config)
    if world_size() == 1 or settings.strategy != "deepspeed" or settings.zero_stage != 3:
        return None
    from transformers.integrations import HfDeepSpeedConfig

    return HfDeepSpeedConfig(deepspeed_config(config))


def is_split(config: TrainingConfig) -> bool:
    """Return True if the model is sharded across processes."""
    settings = settings_of(config)
    by_zero = settings.strategy == "deepspeed" and settings.zero_stage == 3
    return world_size() > 1 and (by_zero or settings.strategy in (*_AT_LOADING, "pipeline_parallel"))


def trainer_arguments(config: TrainingConfig) -> dict[str, Any]:
    """Return keyword arguments for ``transformers.TrainingArguments``; empty for one process."""
    if world_size() == 1:
        return {}
    settings = settings_of(config)
    arguments: dict[str, Any] = {
        "ddp_timeout": int(settings.timeout_seconds),
        "ddp_find_unused_parameters": False,
    }
    if settings.strategy in _AT_LOADING:
        arguments["save_only_model"] = True  # required by transformers; ``resumable`` resets it
    if settings.strategy in ("tensor_parallel", "sequence_parallel", "pipeline_parallel"):
        from gym_fed.training.processes.shared_rows import AnyDeviceParallelism, SharedRows

        if settings.strategy == "tensor_parallel":  # every process gets the same rows
            arguments["parallelism_config"] = AnyDeviceParallelism(tp_size=world_size())
        elif settings.strategy == "pipeline_parallel":
            arguments["parallelism_config"] = SharedRows(size=world_size())
        else:
            arguments["parallelism_config"] = SharedRows(size=sequence_parallel_size(config))
    if settings.strategy == "deepspeed":
        arguments["deepspeed"] = deepspeed_config(config)
    return arguments


def resumable(trainer: Any) -> None:
    """Make a trainer write unsplit checkpoints, which ``sharded_checkpoints`` can load."""
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        trainer.args.save_only_model = False


def deepspeed_config(config: TrainingConfig) -> dict[str, Any]:
    """Return DeepSpeed's config with all numbers resolved, as splitting while loading requires."""
    settings = settings_of(config)
    stage = settings.zero_stage or 2
    batch = config.per_device_train_batch_size
    zero: dict[str, Any] = {"stage": stage}
    if settings.cpu_offload:
        zero["offload_optimizer"] = {"device": "cpu"}
        if stage == 3:
            zero["offload_param"] = {"device": "cpu"}
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "train_batch_size": batch * config.gradient_accumulation_steps * world_size(),
        "gradient_clipping": config.max_grad_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": config.dtype == "bfloat16" or config.mixed_precision == "bf16"},
        "fp16": {"enabled": config.dtype == "float16" or config.mixed_precision == "fp16"},
    }
