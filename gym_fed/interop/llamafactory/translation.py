"""The state of a translation (keys of LLaMA-Factory that are translated, not needed or lost), and the job of a file."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from gym_fed.config.parsed import Job, Translation

_MODEL = "model_name_or_path"
_STAGE_KEYS = ("stage", "finetuning_type", "dataset_dir", "template", "do_train", "cutoff_len")
_VERSION_1_KEYS = (
    *("model_class", "train_dataset", "peft_config", "kernel_config", "dist_config", "quant_config"),
    *("optim_config", "init_config", "micro_batch_size", "batching_strategy", "sample_backend"),
)


def is_llamafactory(values: Mapping[str, Any]) -> bool:
    """Return True for a LLaMA-Factory file: it has a model and a stage, or a key that only LLaMA-Factory uses."""
    return (_MODEL in values and any(key in values for key in _STAGE_KEYS)) or is_version_1(values)


def is_version_1(values: Mapping[str, Any]) -> bool:
    """Return True for a file of LLaMA-Factory's version 1, whose key ``model`` is the same as gym-fed's."""
    return "model" in values and any(key in values for key in _VERSION_1_KEYS)


class Translator:
    """Reads keys of the file, writes gym-fed's keys, and tracks which keys have not been read.

    Args:
        given: The file's values.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self.result = Translation()
        self._given = {key: value for key, value in given.items() if value is not None}
        self._untaken = dict.fromkeys(given)
        self.known: dict[str, None] = {}
        """Every key that was looked up. Together with the tables of ``keys``, these are the known keys."""

    def take(self, key: str, default: Any = None) -> Any:
        """Return the file's value of ``key`` and mark the key as taken."""
        self._untaken.pop(key, None)
        self.known[key] = None
        return self._given.get(key, default)

    def has(self, key: str) -> bool:
        """Return True if the file has a value for ``key``."""
        self.known[key] = None
        return key in self._given

    def put(self, path: str, value: Any, origin: str | None = None) -> None:
        """Set a key of gym-fed, such as ``lora.r``; ``origin`` is the corresponding key of the file."""
        keys = tuple(path.split("."))
        section = self.result.values
        for key in keys[:-1]:
            section = section.setdefault(key, {})
        section[keys[-1]] = value
        if origin is not None and self.has(origin):
            self.result.origins[keys] = origin

    def move(self, key: str, path: str, default: Any = None) -> None:
        """``take`` a value and ``put`` it, unless the file has none and there is no default."""
        value = self.take(key, default)
        if value is not None:
            self.put(path, value, key)

    def note(self, key: str, text: str) -> None:
        """Add a note on a key that does not change the result."""
        self.result.notes[key] = text

    def lose(self, key: str, why: str) -> None:
        """Record a key on which the result depends and which cannot be translated."""
        self.result.lost[key] = why

    def lose_if(self, key: str, why: str, *, harmless: tuple[Any, ...] = (False,)) -> None:
        """``lose`` unless the key is absent or its value is in ``harmless``."""
        value = self.take(key)
        if value is not None and value not in harmless:
            self.lose(key, why)

    def untaken(self) -> list[str]:
        """Return the keys that have not been taken, in the file's order."""
        return list(self._untaken)

    def leave(
        self, not_needed: Mapping[str, str], prefixes: Mapping[str, str], known: Iterable[str] = ()
    ) -> None:
        """Report the keys that were not taken: a note for a key that is not needed, a loss for an unknown one.

        Args:
            not_needed: The reasons, by key.
            prefixes: The reasons, by prefix of keys.
            known: Further keys to suggest for an unknown one.
        """
        names = [*not_needed, *known, *self.known]
        for key in self.untaken():
            by_prefix = (text for start, text in prefixes.items() if key.startswith(start))
            why = not_needed.get(key) or next(by_prefix, None)
            value = self.take(key)
            if why is None:
                close = difflib.get_close_matches(key, names, n=1)
                self.lose(key, "unknown key" + (f" (did you mean {close[0]!r}?)" if close else ""))
            elif value not in (None, False):
                self.note(key, why)


def names(value: Any) -> list[str]:
    """Return ``"a, b"`` or ``["a", "b"]`` as a list."""
    items = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    return [text for item in items if (text := str(item).strip())]


_TRAINS_ONLY = ("stage", "finetuning_type", "dataset", "do_train", "do_eval", "do_predict", "cutoff_len")


def job_of(given: dict[str, Any]) -> Job:
    """Return the job of a file.

    In LLaMA-Factory the command decides (``train``, ``export``, ``chat``), but the files for each command have specific
    keys. A file that trains and then evaluates or predicts is a training file.
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


_VIDEOS = "video and audio are prepared by the model's own processor"

NOT_NEEDED: dict[str, str] = {
    # Preparation of rows: caches depend on the settings, and the tokenizer uses every core.
    "overwrite_cache": "cached rows are keyed by every setting that affects them",
    "preprocessing_batch_size": "rows are encoded in batches of 1,000",
    "preprocessing_num_workers": "the tokenizer already uses all cores",
    "data_shared_file_system": "the main process encodes the rows for all processes",
    "dataloader_num_workers": "encoded rows are in memory or memory-mapped",
    "dataloader_pin_memory": "encoded rows are in memory or memory-mapped",
    "dataloader_prefetch_factor": "encoded rows are in memory or memory-mapped",
    "dataloader_persistent_workers": "encoded rows are in memory or memory-mapped",
    "remove_unused_columns": "each algorithm keeps the columns that it uses",
    "buffer_size": "the whole dataset is shuffled",
    "streaming": "rows are stored once, memory-mapped, and fully shuffled",
    "ignore_pad_token_for_loss": "padding is never included in the loss",
    # Loading of models.
    "use_fast_tokenizer": "the tokenizer in the model's folder is used",
    "low_cpu_mem_usage": "transformers' default",
    "cache_dir": "set HF_HOME to move the Hugging Face cache",
    "model_revision": "the snapshot in the local cache is used",
    "hf_hub_token": "nothing is downloaded",
    "ms_hub_token": "nothing is downloaded",
    "om_hub_token": "nothing is downloaded",
    "offload_folder": "nothing is offloaded to files",
    "use_reentrant_gc": "checkpointing is always non-reentrant; the gradients are the same",
    "use_unsloth_gc": "transformers' gradient checkpointing is used",
    "print_param_status": "for debugging",
    "use_kv_cache": "for generation only",
    "gradient_checkpointing_kwargs": "checkpointing is always non-reentrant; the gradients are the same",
    "use_v1_kernels": "kernels affect speed, not results",
    "fp8_backend": "used only with fp8",
    "fp8_enable_fsdp_float8_all_gather": "used only with fp8",
    "fsdp_transformer_layer_cls_to_wrap": "fsdp2 wraps every block",
    "infer_backend": "for inference only",
    "infer_dtype": "for inference only",
    "upcast_lmhead_output": "the loss is always computed in float32",
    "double_quantization_device_map": "for inference only",
    "quantization_device_map": "for inference only",
    # Reports of a run.
    "plot_loss": "use gym runs plot",
    "include_num_input_tokens_seen": "always counted",
    "include_tokens_per_second": "always counted",
    "include_effective_tokens_per_second": "always counted",
    "include_mfu": "not measured",
    "logging_first_step": "always logged",
    "logging_strategy": "every step is recorded",
    "logging_dir": "metrics are written to the run folder",
    "disable_tqdm": "the progress bar is shown only on terminals",
    "log_level": "not needed",
    "log_on_each_node": "not needed",
    "compute_accuracy": "token (or preference) accuracy is always logged",
    "eval_accumulation_steps": "not needed",
    "per_device_eval_batch_size": "evaluation uses per_device_train_batch_size",
    "eval_on_each_dataset": "all of eval_data is evaluated together",
    "do_eval": "done if eval_data is set",
    "eval_on_start": "not done",
    "save_only_model": "checkpoints include the optimiser state, so that a run can resume",
    "save_safetensors": "always",
    "push_to_hub": "nothing is uploaded",
    "hub_model_id": "nothing is uploaded",
    "overwrite_output_dir": "pass --overwrite to gym train",
    "ddp_timeout": "see distributed.timeout_seconds",
    "ddp_find_unused_parameters": "not needed",
    "ddp_backend": "see distributed.backend",
    "local_rank": "set by the launcher",
    "full_determinism": "see reproducibility.deterministic",
    "badam_verbose": "nothing is printed",
    "trust_remote_code": "code shipped with a model is never run; transformers must support its architecture",
    "video_max_pixels": _VIDEOS,
    "video_min_pixels": _VIDEOS,
    "video_fps": _VIDEOS,
    "video_maxlen": _VIDEOS,
    "use_audio_in_video": _VIDEOS,
    "audio_sampling_rate": _VIDEOS,
    # Ray and SwanLab.
    "use_swanlab": "see tracking",
    "use_ray": "gym train runs on this machine",
}

_MEGATRON = "Megatron is not used; this setting affects speed, not results"

NOT_NEEDED |= dict.fromkeys(
    (
        *("use_mca", "use_megatron_bridge", "use_distributed_optimizer", "bias_activation_fusion"),
        *("apply_rope_fusion", "masked_softmax_fusion", "cross_entropy_loss_fusion", "overlap_param_gather"),
        *("overlap_grad_reduce", "moe_grouped_gemm", "moe_token_dispatcher_type", "recompute_granularity"),
        *(
            "mixed_precision",
            "recompute_method",
            "recompute_num_layers",
            "sequence_parallel",
            "export_hf_on_finish",
        ),
    ),
    _MEGATRON,
)

NOT_NEEDED_PREFIXES = {
    "kt_": "used only with use_kt",
    "ray_": NOT_NEEDED["use_ray"],
    "swanlab_": NOT_NEEDED["use_swanlab"],
}

_PIXELS = "images are prepared by the model's own processor"

_TOKENS = (
    "training does not add tokens to a model; add them first (transformers: tokenizer.add_tokens, "
    "model.resize_token_embeddings, save_pretrained of both), set model_name_or_path to that folder, and under LoRA "
    "train the new rows with additional_target: embed_tokens,lm_head"
)

_PARALLEL = (
    "Megatron's parallel strategies are not supported; use fsdp, deepspeed, or our distributed.strategy "
    "tensor_parallel or pipeline_parallel"
)

_TEMPLATE = "the tokenizer's chat template renders conversations"

NO_COUNTERPART: dict[str, str] = {
    "interleave_probs": "sources are concatenated; give each a weight in our data list",
    "tool_format": _TEMPLATE,
    "preserve_thinking": _TEMPLATE,
    "split_special_tokens": "special tokens in the text are never split",
    "add_tokens": _TOKENS,
    "add_special_tokens": _TOKENS,
    "new_special_tokens_config": _TOKENS,
    "resize_vocab": _TOKENS,
    "image_do_pan_and_scan": _PIXELS,
    "crop_to_patches": _PIXELS,
    "train_from_scratch": "set the model's dimensions in our model_init",
    "moe_aux_loss_coef": "the model's own coefficient is used",
    "upcast_layernorm": "all weights have the same dtype",
    "additional_adapters": "only one adapter is trained",
    "adapter_folder": "write the full path in adapter_name_or_path",
    "ref_model_quantization_bit": "the reference is the initial model",
    "reward_model_adapters": "set reward_model to the folder of a finished reward model",
    "reward_model_quantization_bit": "the reward model is not quantised",
    "pref_bco_weight": "this loss term is not supported",
    "ppo_score_norm": "advantages are whitened instead of the rewards",
    "ppo_whiten_rewards": "advantages are whitened instead of the rewards",
    "average_tokens_across_devices": "the loss is averaged over all tokens of the batch",
    "fp8": "float8 training needs torchao and a GPU with float8 support (H100); bf16: true trains in 16 bits",
    "use_kt": "KTransformers computes experts with its own CPU kernels (AMX); without it, the model must fit on a GPU",
    "tensor_model_parallel_size": _PARALLEL,
    "pipeline_model_parallel_size": _PARALLEL,
    "virtual_pipeline_model_parallel_size": _PARALLEL,
    "expert_model_parallel_size": _PARALLEL,
    "context_parallel_size": _PARALLEL,
    "use_packed_sequences": "write packing",
    "megatron_pretrained_checkpoint": "set model_name_or_path to a model in transformers' format",
    "extra_config": "Megatron's own settings have no counterpart",
    "load_best_model_at_end": "use early_stopping, which keeps the best checkpoint",
    "metric_for_best_model": "use our early_stopping.metric",
    "callbacks": "user code is never run",
}
"""Keys without a counterpart that change the result unless they are off."""

HARMLESS_VALUES = {
    "tensor_model_parallel_size": (1,),
    "pipeline_model_parallel_size": (1,),
    "virtual_pipeline_model_parallel_size": (1,),
    "expert_model_parallel_size": (1,),
    "context_parallel_size": (1,),
    "split_special_tokens": (False,),
    "average_tokens_across_devices": (True,),
    "pref_bco_weight": (0, 0.0),
}
"""Values, in addition to false, that are LLaMA-Factory's defaults or equal gym-fed's behaviour."""
