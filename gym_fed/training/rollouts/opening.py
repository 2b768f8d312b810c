"""Start the vLLM of a run, or connect to it, and make a trainer generate with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.base.models import resolve
from gym_fed.config.algorithms.reinforcement import RolloutEngine, RolloutSettings
from gym_fed.serving.engine.request import SamplingParams
from gym_fed.serving.vllm.connection import VllmInstallation, VllmOptions, connect_vllm, start_vllm
from gym_fed.serving.vllm_plugin.settings import PluginSettings
from gym_fed.training.rollouts.client import RolloutClient
from gym_fed.training.rollouts.generation import VllmGeneration
from gym_fed.training.rollouts.policy import rank_for_vllm

if TYPE_CHECKING:
    from gym_fed.serving.vllm.process import RemoteVllm, VllmProcess
    from gym_fed.training.run.job import Job

_BASE = "base"
_MAX_CONCURRENT = 256
_MIN_CACHE_BYTES, _MAX_CACHE_BYTES = 2**28, 2**32


def generate_by_vllm(trainer: Any, job: Job, settings: RolloutSettings, *, per_answer: bool) -> None:
    """Make a TRL trainer generate with the vLLM of ``settings.rollouts``, which is stopped at the end of the run.

    Sets the attributes that TRL sets under ``use_vllm``, without requiring the vllm package in this environment.

    Args:
        trainer: A ``GRPOTrainer`` or ``RLOOTrainer`` with ``Rollouts``.
        job: The run's job.
        settings: The algorithm's section of the config.
        per_answer: True if the loss, and therefore the correction, has one importance ratio per answer.

    Raises:
        GymError: ``MODEL_INVALID`` for an adapter that vLLM does not support; errors from ``start_vllm`` and
            ``connect_vllm``.
    """
    engine = settings.rollouts
    assert engine is not None
    answers = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
    context = job.config.max_length + settings.max_completion_length
    context = min(context, getattr(job.model.config, "max_position_embeddings", context))
    server = _server(job, engine, context, answers)
    job.resources.callback(server.close)
    sampling = SamplingParams(
        max_tokens=settings.max_completion_length,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p or 0.0,
        repetition_penalty=settings.repetition_penalty,
        logprobs=0,
    )
    end_ids, num_tokens = frozenset(trainer.eos_token_ids), job.model.get_input_embeddings().weight.shape[0]
    client = RolloutClient(server, sampling, end_ids, num_tokens, context, engine.start_seconds)
    job.resources.callback(client.close)
    trainer.vllm_generation = VllmGeneration(
        trainer, client, trainer.prompts_of_generation, engine.max_staleness, job.config.seed
    )
    trainer.rollout_client = client
    trainer.use_vllm, trainer.vllm_mode, trainer._last_loaded_step = True, "server", -1
    trainer.vllm_importance_sampling_correction = engine.correction != "none"
    trainer.vllm_importance_sampling_mode = "sequence_truncate" if per_answer else "token_truncate"
    trainer.vllm_importance_sampling_clip_max, trainer.vllm_importance_sampling_clip_min = engine.cap, None


def _server(job: Job, engine: RolloutEngine, context: int, answers: int) -> VllmProcess | RemoteVllm:
    config = job.config
    rank = rank_for_vllm(job.model)
    if engine.url is not None:
        shorten = "set max_length so that its sum with max_completion_length is at most {}"
        return connect_vllm(engine, f"{config.algorithm}.rollouts", context, shorten)
    installation = VllmInstallation.find(engine.python)
    dtype = engine.dtype or config.dtype
    cache_bytes = _cache_bytes(job.model.config, context * answers, dtype) if installation.on_cpu else None
    assert config.model is not None  # see check_rollouts
    options = VllmOptions(
        model=Path(resolve(config.model)),
        served_name=_BASE,
        dtype=dtype,
        max_context=context,
        max_concurrent=min(answers, _MAX_CONCURRENT),
        slots=1,
        variants_in_memory=2,
        max_lora_rank=rank,
        tensor_parallel_size=engine.tensor_parallel_size,
        kv_cache_bytes=cache_bytes,
        max_batch_tokens=None,
        prefix_cache=True,
        trains=True,
        arguments=tuple(engine.args),
    )
    environment, seconds = PluginSettings(None).environment(), engine.start_seconds
    return start_vllm(installation, options, environment, config.num_threads, seconds, job.resources)


def _cache_bytes(model: Any, tokens: int, dtype: str) -> int:
    """Return the bytes of a KV cache for ``tokens`` tokens, within bounds; vLLM preempts answers that do not fit."""
    head_dim: int = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    heads: int = getattr(model, "num_key_value_heads", None) or model.num_attention_heads
    width = 4 if dtype == "float32" else 2
    needed = 2 * int(model.num_hidden_layers) * heads * head_dim * width * tokens
    return min(max(needed, _MIN_CACHE_BYTES), _MAX_CACHE_BYTES)
