"""Costs of joining: training time, size of updates and downloads."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gym_client.agent.global_model import GlobalModel
from gym_client.hub.traffic import Bandwidth
from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.task import LoraRecipe, TrainingRecipe
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted, plain, readable_bytes, readable_seconds

_HEAD = "lm_head"

_STEPS = 2
"""Number of timed steps, after one warm-up step."""

_MAX_SECONDS = 6.0
"""Time limit for all timed steps; slow recipes are timed on fewer rows."""

_TOO_MANY_SECONDS = 18.0
"""Maximum expected seconds of the smallest batch; above this, nothing is timed."""

_PASSES = 3
"""Cost of a training step in forward passes: a backward pass costs two (Kaplan et al. 2020, section 2.1)."""

_FIRST_TOKENS = 16
_LONG_ENOUGH_SECONDS = 2.0
_FEWEST_ROWS = 64
_MAX_REASON = 80


@dataclass(frozen=True)
class RoundTime:
    """Training time of one round on this machine, without encoding and transfers.

    Attributes:
        seconds: Seconds of one round; None if unknown.
        measured: Description of what was timed, or the reason why nothing was.
    """

    seconds: float | None
    measured: str


class _Timed(Exception):
    """Raised after the last timed step, to discard the run."""


def time_round(
    model: GlobalModel,
    recipe: TrainingRecipe,
    rows: Sequence[dict[str, Any]],
    device: str,
    stop: threading.Event,
) -> RoundTime:
    """Time training steps of ``recipe`` on some of ``rows``. The model's tensors are restored afterwards.

    Raises:
        GymError: ``INTERRUPTED`` after ``stop``. Nothing is raised for a recipe that cannot be timed.
    """
    if stop.is_set():
        raise GymError(ErrorCode.INTERRUPTED, "stopped", "run the same command again")
    batch = recipe.per_device_train_batch_size * recipe.gradient_accumulation_steps
    pace, tokens = _pace(model.model, recipe.max_length, device, stop)
    row_tokens = _row_tokens(model, recipe, rows)
    row_seconds = _PASSES * pace * row_tokens
    least = _least_rows(recipe)
    fitting = max(int(_MAX_SECONDS / ((1 + _STEPS) * row_seconds)), least)
    if (1 + _STEPS) * row_seconds * least > _TOO_MANY_SECONDS:
        seconds = row_seconds * batch * recipe.max_steps
        return RoundTime(
            seconds,
            f"one pass of {counted(tokens, 'token')}, scaled to rows of {counted(row_tokens, 'token')}",
        )
    try:
        step, tried = _step_seconds(model, recipe, rows, device, stop, fitting)
    except GymError as error:
        if error.code is ErrorCode.INTERRUPTED:
            raise
        return RoundTime(None, f"the training steps could not be run: {error.message}")
    return RoundTime(step * batch / tried * recipe.max_steps, f"{_STEPS} steps of {counted(tried, 'row')}")


def _row_tokens(model: GlobalModel, recipe: TrainingRecipe, rows: Sequence[dict[str, Any]]) -> int:
    """Return the 95th percentile of row lengths in tokens, including padding.

    The result is ``max_length`` for packed rows and for rows that cannot be encoded.
    """
    from gym_fed.config.hub.round_training import round_training
    from gym_fed.core.registries import ALGORITHMS
    from gym_fed.data.chat_templates.choice import use_chat_template
    from gym_fed.training.rows.encode_part import rows_to_encode

    config = round_training(recipe, 1, Path("run"), "cpu")
    algorithm = ALGORITHMS.new(config.algorithm)
    if algorithm.packing_default if config.packing is None else bool(config.packing):
        return recipe.max_length
    try:
        tokenizer = use_chat_template(model.tokenizer, config.chat_template)
        encoded = rows_to_encode(config, tokenizer, _some(rows, _FEWEST_ROWS))
        lengths = sorted(algorithm.lengths(config, tokenizer, encoded))
    except GymError:
        return recipe.max_length
    return min(recipe.max_length, lengths[-1 - len(lengths) // 20] if lengths else recipe.max_length)


def _step_seconds(
    model: GlobalModel,
    recipe: TrainingRecipe,
    rows: Sequence[dict[str, Any]],
    device: str,
    stop: threading.Event,
    fitting: int,
) -> tuple[float, int]:
    """Return seconds per step and rows per step; the rows are the recipe's batch if that fits into the time limit."""
    from gym_fed.config.hub.round_training import round_training
    from gym_fed.training.trainer import Trainer

    batch = recipe.per_device_train_batch_size * recipe.gradient_accumulation_steps
    sizes: dict[str, Any] = {"max_steps": max(recipe.max_steps, 1 + _STEPS)}
    if fitting < batch:
        sizes |= {"per_device_train_batch_size": fitting, "gradient_accumulation_steps": 1}
    ends: list[float] = []

    def on_step(step: int, total: int, loss: float) -> None:
        if stop.is_set():
            raise GymError(ErrorCode.INTERRUPTED, "stopped", "run the same command again")
        ends.append(time.perf_counter())
        if len(ends) > _STEPS:
            raise _Timed

    with tempfile.TemporaryDirectory(prefix="gym-client-") as folder:
        config = round_training(recipe.model_copy(update=sizes), 1, Path(folder) / "run", device)
        trainer = Trainer(
            config,
            model=model.model,
            tokenizer=model.tokenizer,
            on_step=on_step,
            on_rows=lambda name, counts: None,
        )
        try:
            trainer.train(dataset=_some(rows, (1 + _STEPS) * batch))
        except _Timed:
            pass
        finally:
            model.restore()
    return (ends[-1] - ends[0]) / _STEPS, min(fitting, batch)


def _some(rows: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return about ``count`` rows, evenly spread over the data."""
    return list(rows[:: max(1, len(rows) // max(count, _FEWEST_ROWS))])


def _least_rows(recipe: TrainingRecipe) -> int:
    from gym_fed.core.registries import ALGORITHMS

    section = recipe.chosen_sections().get(recipe.algorithm)
    return 1 if section is None else int(ALGORITHMS.type_of(recipe.algorithm).least_batch(section))


def _pace(model: Any, most_tokens: int, device: str, stop: threading.Event) -> tuple[float, int]:
    """Return the seconds per token of a forward pass and the number of tokens in the longest measured pass.

    Lengths are doubled until the time suffices, because short passes are inefficient.
    """
    from gym_fed.base.models import pick_device

    place = pick_device(device)
    model.to(place)
    tokens = min(_FIRST_TOKENS, most_tokens)
    seconds = _pass_seconds(model, tokens, place)
    if seconds < _MAX_SECONDS:  # the first pass also loads kernels and starts threads
        seconds = _pass_seconds(model, tokens, place)
    pace = seconds / tokens
    while seconds < _LONG_ENOUGH_SECONDS and tokens < most_tokens:
        if stop.is_set():
            raise GymError(ErrorCode.INTERRUPTED, "stopped", "run the same command again")
        tokens = min(2 * tokens, most_tokens)
        seconds = _pass_seconds(model, tokens, place)
        pace = min(pace, seconds / tokens)
    return pace, tokens


def _pass_seconds(model: Any, tokens: int, place: Any) -> float:
    import torch

    ids = torch.zeros((1, tokens), dtype=torch.long, device=place)
    begun = time.perf_counter()
    with torch.no_grad():
        float(model(input_ids=ids, use_cache=False).logits[0, -1, 0])  # waits for the GPU to finish
    return time.perf_counter() - begun


@dataclass(frozen=True)
class Costs:
    """Measured and announced costs. They are not part of the accepted terms, since they change from run to run.

    Attributes:
        round_seconds: Seconds of training in one round; None if it could not be measured.
        total_seconds: Seconds of training in all remaining rounds; None if their number is unknown.
        measured: Description of what was timed, or the reason why nothing was.
        base_bytes: Bytes of the base model that were fetched in this run.
        total_download_bytes: Bytes of the base, the soups to join, and the soups of all remaining rounds.
        down_bytes_per_second: The download bandwidth; None if unknown.
        bandwidth_known_by: Description of how the bandwidth was measured.
    """

    round_seconds: float | None
    total_seconds: float | None
    measured: str
    base_bytes: int
    total_download_bytes: int
    down_bytes_per_second: float | None
    bandwidth_known_by: str

    @classmethod
    def of(
        cls,
        time: RoundTime,
        rounds: int | None,
        base_bytes: int,
        soup_bytes: int,
        bandwidth: Bandwidth | None,
    ) -> Costs:
        """Compute the totals.

        Args:
            time: The time of one round.
            rounds: Number of remaining rounds; None if unknown.
            base_bytes: Bytes of the base model that were fetched in this run.
            soup_bytes: Bytes of the soups, both to join and in all remaining rounds.
            bandwidth: The download bandwidth.
        """
        total = None if time.seconds is None or rounds is None else time.seconds * rounds
        return cls(
            round_seconds=time.seconds,
            total_seconds=total,
            measured=time.measured,
            base_bytes=base_bytes,
            total_download_bytes=base_bytes + soup_bytes,
            down_bytes_per_second=bandwidth.bytes_per_second if bandwidth else None,
            bandwidth_known_by=bandwidth.known_by if bandwidth else "",
        )

    def round_time(self) -> str:
        """Describe the training time of a round."""
        if self.round_seconds is None:
            return f"not timed: {plain(self.measured, _MAX_REASON)}"
        return f"about {readable_seconds(self.round_seconds)} a round"

    def total_time(self) -> str:
        """Describe the training time of all remaining rounds, in brackets; empty if it is unknown."""
        return "" if self.total_seconds is None else f" ({readable_seconds(self.total_seconds)})"

    def base_in_words(self) -> str:
        """Describe the download of the base."""
        if not self.base_bytes:
            return "no base (it is already here)"
        return f"the base's {readable_bytes(self.base_bytes)}"

    def download_time(self) -> str:
        """Describe the total download time, in brackets; empty if the bandwidth is unknown."""
        if self.down_bytes_per_second is None:
            return ""
        return f" (about {readable_seconds(self.total_download_bytes / self.down_bytes_per_second)})"

    def pace_in_words(self) -> list[str]:
        """Describe the bandwidth; empty if it is unknown."""
        if self.down_bytes_per_second is None:
            return []
        return [f"at {readable_bytes(self.down_bytes_per_second)}/s ({self.bandwidth_known_by})"]


def update_bytes(model: GlobalModel, recipe: TrainingRecipe, codec: CodecPolicy) -> int:
    """Compute the maximum size in bytes of a round's ``.gymdelta`` file, before training.

    The result is exact except in three cases: ``group_size: auto`` (the larger size is assumed), budgets (the budget is
    returned), and ``factors: auto``, where the header may differ by a few bytes.
    """
    from gym_quant.codecs.lora import factor_budget
    from gym_quant.registry import get_codec

    from gym_fed.delta.budget import estimated_bytes, file_bytes
    from gym_fed.delta.manifest import TensorRecord
    from gym_fed.delta.policy import CodecChoice

    if not recipe.sends_factors:
        return estimated_bytes(model.base.shapes, codec, model.base)
    lora = get_codec("lora")
    choices = []
    for name, shape in _adapted(model.model, recipe.lora):
        wanted_params = _factor_params(recipe.lora, codec)
        params = lora.normalise({**wanted_params, "rank": min(recipe.lora.r, *shape)}, shape)
        payload_bytes = lora.payload_bytes(shape, params)
        if codec.factors == "auto":
            payload_bytes = factor_budget(codec.factor_bits, recipe.lora.r * sum(shape))
        choices.append(CodecChoice(TensorRecord(name, shape, lora.name, params), payload_bytes, "estimate"))
    return file_bytes(choices, model.base, {})


def _factor_params(recipe: LoraRecipe, codec: CodecPolicy) -> dict[str, Any]:
    """Return the codec's parameters without the rank; for ``factors: auto``, those of one candidate."""
    if not codec.quantises_factors:
        return {"scaling": recipe.lora_alpha / recipe.r, "factors": codec.factors}
    return {
        "factors": "int4" if codec.factors == "auto" else codec.factors,
        "factor_group_size": codec.factor_group_size,
    }


def _adapted(model: Any, recipe: LoraRecipe) -> list[tuple[str, tuple[int, int]]]:
    """Return the names and shapes of the linear weights that the recipe adapts, by PEFT's rules."""
    import torch

    weights: list[tuple[str, tuple[int, int]]] = []
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        last = name.rpartition(".")[2]
        is_adapted = last != _HEAD if recipe.target_modules == "all-linear" else last in recipe.target_modules
        if is_adapted:
            weights.append((f"{name}.weight", (module.out_features, module.in_features)))
    return weights
