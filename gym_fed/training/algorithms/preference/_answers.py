"""What the preference algorithms share: pairs to token ids, the reference model, and TRL's trainers on ids."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.data.chat_templates.conversation import Reasoning, write_answered
from gym_fed.data.encoding import require_chat_template
from gym_fed.data.row_counts import EncodedRows, RowCounts
from gym_fed.data.rows import Row, place_of
from gym_fed.errors import ErrorCode, GymError
from gym_fed.training.algorithms.base import Algorithm
from gym_fed.training.run.job import Job

_CHUNK_ROWS = 1000


class Pairs(Algorithm):
    """What learns from pairs of answers to a prompt."""

    row_kind = "preference"

    def check(self, config: TrainingConfig) -> None:
        check_preference(config)

    def encode(self, config: TrainingConfig, tokenizer: Any, rows: list[Row]) -> EncodedRows:
        """Ids of prompts and answers; see ``cut_answers`` for rows longer than ``max_length``."""
        encoded = encode_answers(tokenizer, rows, ("chosen", "rejected"), reasoning=config.reasoning)
        return cut_answers(encoded, config.max_length)


def check_preference(config: TrainingConfig) -> None:
    """Refuse keys that only texts and conversations have, and dropout that TRL would switch off.

    Raises:
        GymError: ``CONFIG_INVALID``.
    """
    for key in ("packing", "train_on_prompt", "assistant_only_loss", "mask_history"):
        if getattr(config, key) not in (None, type(config).model_fields[key].default):
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"{key}: {config.algorithm} learns from answers to prompts and does not read it",
                "remove it",
            )
    sections = config.chosen_sections()
    settings = sections.get(config.algorithm)
    dropout = next(
        (
            f"{config.finetuning}.{key}"
            for key, value in sections.get(config.finetuning, ())
            if key.endswith("dropout") and value
        ),
        None,
    )
    if getattr(settings, "disable_dropout", False) and dropout is not None:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"{dropout}: {config.algorithm} switches dropout off",
            f"remove it, or set {config.algorithm}.disable_dropout: false",
        )


def encode_answers(
    tokenizer: Any, rows: Sequence[Row], answers: tuple[str, ...], *, reasoning: Reasoning = "learn"
) -> list[dict[str, Any]]:
    """Token ids of prompts and answers, uncut.

    A conversation is rendered by the chat template, a plain text gets an end token. The answer begins where prompt and
    prompt with answer part, as in TRL; of a pair, where the first of the two does.

    Args:
        tokenizer: Conversations need its chat template.
        rows: See ``gym_fed.data.rows``.
        answers: Columns with answers, such as ``("chosen", "rejected")``.
        reasoning: What becomes of ``reasoning_content`` of their messages: it counts with the answer, or is left out.

    Returns:
        ``{"prompt_ids", "chosen_ids", "rejected_ids"}`` per row: lists of ids.

    Raises:
        GymError: ``DATA_INVALID`` naming the row.
    """
    encoded = []
    for start in range(0, len(rows), _CHUNK_ROWS):
        chunk = rows[start : start + _CHUNK_ROWS]
        for number, row in enumerate(chunk, start + 1):
            _check_row(row, answers, number)
        prompts = _tokenise(tokenizer, chunk, None, start + 1, reasoning)
        columns = [_tokenise(tokenizer, chunk, key, start + 1, reasoning) for key in answers]
        for prompt, *wholes in zip(prompts, *columns, strict=True):
            length = min(_common_prefix(prompt, whole) for whole in wholes)
            parts = {f"{key}_ids": whole[length:] for key, whole in zip(answers, wholes, strict=True)}
            encoded.append({"prompt_ids": prompt[:length], **parts})
    return encoded


def cut_answers(encoded: list[dict[str, Any]], max_length: int) -> EncodedRows:
    """Answers cut so that prompt and answer have at most ``max_length`` tokens; TRL's ``keep_start``.

    Rows whose prompt leaves no room are dropped; the ``counts`` of the result are of rows and of their answers' tokens.
    ``length`` is added: that of the longer answer with its prompt.

    Raises:
        GymError: ``DATA_INVALID`` when no row is left.
    """
    counts, kept = RowCounts(), []
    for row in encoded:
        prompt, answers = len(row["prompt_ids"]), _answers(row)
        room = max(0, max_length - prompt)
        counts.count(
            prompt + max(map(len, answers)),
            cut=any(len(answer) > room for answer in answers),
            tokens=sum(min(len(answer), room) for answer in answers),
            tokens_cut=sum(max(0, len(answer) - room) for answer in answers),
        )
        if room and any(answers):
            cut = {key: value[:room] if key in _answer_keys(row) else value for key, value in row.items()}
            kept.append({**cut, "length": prompt + max(map(len, _answers(cut)))})
    require_some(kept, counts, max_length)
    return EncodedRows(kept, counts)


def require_some(kept: Sequence[Any], counts: RowCounts, max_length: int) -> None:
    """Refuse to learn from nothing.

    Raises:
        GymError: ``DATA_INVALID`` when none of the rows in ``counts`` is left.
    """
    if not kept:
        raise counts.nothing_learned(max_length)


def _answer_keys(row: dict[str, Any]) -> list[str]:
    return [key for key in row if key.endswith("_ids") and key != "prompt_ids"]


def _answers(row: dict[str, Any]) -> list[list[int]]:
    return [row[key] for key in _answer_keys(row)]


def _check_row(row: Row, answers: tuple[str, ...], number: int) -> None:
    keys = ("prompt", *answers)
    if row.get("images"):
        raise GymError(
            ErrorCode.DATA_INVALID,
            f"row {number}: preferences about images are not supported",
            "remove the images",
        )
    texts = [isinstance(row[key], str) for key in keys]
    if all(texts) or all(_is_conversation(row[key]) for key in keys):
        return
    raise GymError(
        ErrorCode.DATA_INVALID,
        f"row {number}: {', '.join(keys)} must be lists of messages, or all of them strings",
        'write messages as {"role": ..., "content": ...}',
    )


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and "role" in m for m in value)


def _tokenise(
    tokenizer: Any, rows: Sequence[Row], answer: str | None, first: int, reasoning: Reasoning
) -> list[list[int]]:
    """Ids of the prompts (``answer`` None) or of prompts with that answer; ``first`` is the first row's number."""
    result: list[list[int]] = [[] for _ in rows]
    chats = [i for i, row in enumerate(rows) if not isinstance(row["prompt"], str)]
    texts = [i for i, row in enumerate(rows) if isinstance(row["prompt"], str)]
    if chats:
        require_chat_template(tokenizer)
        rendered = [_render(tokenizer, rows[i], answer, first + i, reasoning) for i in chats]
        for i, ids in zip(chats, tokenizer(rendered, add_special_tokens=False)["input_ids"], strict=True):
            result[i] = ids
    if texts:
        end = [] if answer is None or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        words = [rows[i]["prompt"] + (rows[i][answer] if answer else "") for i in texts]
        for i, ids in zip(texts, tokenizer(words)["input_ids"], strict=True):
            result[i] = ids if ids[-1:] == end else ids + end
    return result


def _render(tokenizer: Any, row: Row, answer: str | None, number: int, reasoning: Reasoning) -> str:
    tools = row.get("tools")
    return write_answered(
        tokenizer,
        row["prompt"],
        row[answer] if answer else [],
        (json.loads(tools) if isinstance(tools, str) else tools) or None,
        place_of(row, number),
        reasoning=reasoning,
    )


def _common_prefix(ids: list[int], other: list[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), min(len(ids), len(other))
    )


_Trainer: Any = object  # what the mix-ins are placed before


class _OnIds(_Trainer):  # type: ignore[misc]
    """Mix-in, placed before a TRL trainer: rows were tokenised by us, and there is nothing left to prepare."""

    _precompute_engine: Any

    def _prepare_dataset(self, dataset: Any, *args: Any) -> Any:
        return dataset

    def _set_signature_columns_if_needed(self) -> None:
        """``length`` is kept, for batches of rows of like length."""
        super()._set_signature_columns_if_needed()
        if "length" not in self._signature_columns:
            self._signature_columns.append("length")

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        """The data set with columns of the reference's log-probabilities, in memory.

        TRL's own hands them over in a file of the data set's cache, which for rows in memory is a folder of the
        main process alone: the other processes do not find it.
        """
        from torch.utils.data import DataLoader

        loader = self.accelerator.prepare(
            DataLoader(dataset, batch_size=batch_size, collate_fn=self.data_collator, shuffle=False)
        )
        model = self.ref_model or self.model
        if self.ref_model is None and self.is_deepspeed_enabled:
            from trl.models.utils import prepare_deepspeed

            if self._precompute_engine is None:
                self._precompute_engine = prepare_deepspeed(self.model, self.accelerator)
            model = self._precompute_engine
        found: dict[str, list[float]] = {}
        for batch in loader:
            values = self.compute_ref_log_probs(model, batch)
            for column, value in zip(self._reference_columns(), values, strict=True):
                if value is not None:
                    found.setdefault(column, []).extend(self.accelerator.gather_for_metrics(value).tolist())
        for column, numbers in found.items():
            dataset = dataset.add_column(column, numbers)
        return dataset

    def _reference_columns(self) -> tuple[str, str]:
        """What the trainer's collator calls the two that ``compute_ref_log_probs`` gives."""
        if hasattr(self, "calculate_KL"):
            return "ref_logps", "ref_KL_logps"
        return "ref_chosen_logps", "ref_rejected_logps"


class _AdapterOff(_Trainer):  # type: ignore[misc]
    """Mix-in for PEFT models: the reference is the model with its adapter off, and no model beside it.

    TRL would copy the adapter to one called ``ref``, which stays on the model, is saved with it, cannot be made for
    AdaLoRA and subtracts PiSSA's factors from the base a second time. It does so only when no reference is given, so
    one is given, and never kept. Log-probabilities that are computed beforehand are those of the adapter as it starts,
    which need not be the base's.
    """

    _starting = False

    @property
    def ref_model(self) -> Any:
        return self.model if self._starting else None

    @ref_model.setter
    def ref_model(self, value: Any) -> None:
        """Not kept."""

    def _precompute_ref_logps(self, *args: Any) -> Any:
        self._starting = True
        try:
            return super()._precompute_ref_logps(*args)
        finally:
            self._starting = False


@cache
def _on_ids(trainer: type, adapter: bool) -> type:
    mixins = (_AdapterOff, _OnIds) if adapter else (_OnIds,)
    return type(trainer.__name__, (*mixins, trainer), {"__doc__": trainer.__doc__})


def build_on_ids(job: Job, trainer: type, arguments: Any, *, reference: bool) -> Any:
    """A TRL trainer that takes the job's rows as they are.

    Args:
        job: The job.
        trainer: TRL's class.
        arguments: Its config.
        reference: Whether it takes a ``ref_model``. Adapters are switched off for it; where all weights are trained,
            a frozen copy is made unless ``arguments`` say that its log-probabilities are computed beforehand.
    """
    from gym_fed.training.trl_glue import local, quiet_datasets

    adapter = reference and is_adapted(job.model)
    given: dict[str, Any] = {}
    if adapter:
        given["ref_model"] = job.model.get_base_model()
    elif reference and not arguments.precompute_ref_log_probs:
        given["ref_model"] = copy.deepcopy(job.model).requires_grad_(False).eval()
    with quiet_datasets():
        return local(_on_ids(trainer, adapter))(
            model=job.model,
            args=arguments,
            processing_class=job.tokenizer,
            callbacks=job.callbacks,
            **given,
            **job.datasets(),
        )


def precompute(job: Job, wanted: bool | None) -> bool:
    """Whether reference log-probabilities are computed beforehand; see ``ReferenceSettings``.

    Raises:
        GymError: ``CONFIG_INVALID`` when that is refused for an adapter that is not the base at the start.
    """
    if not is_adapted(job.model):
        return True if wanted is None else wanted
    if wanted is None:
        return not starts_as_base(job)
    if not wanted:
        require_start_as_base(job, "remove precompute_ref_log_probs: false")
    return wanted


def require_start_as_base(job: Job, remedy: str) -> None:
    """Refuse an adapter that changes the model before it is trained (PiSSA, OLoRA).

    Raises:
        GymError: ``CONFIG_INVALID``.
    """
    if not starts_as_base(job):
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"{job.config.finetuning}: without the adapter this model is not the one at the start, so it cannot be "
            f"the reference of {job.config.algorithm}",
            remedy,
        )


def is_adapted(model: Any) -> bool:
    """Whether ``model`` is a PEFT model."""
    return hasattr(model, "peft_config")


def starts_as_base(job: Job) -> bool:
    """Whether a PEFT model answers as its base does: true for LoRA, not for PiSSA."""
    from gym_fed.training.trl_glue import adapter_is_idle

    return adapter_is_idle(job.model, job.encoded[0]["prompt_ids"] or _answers(job.encoded[0])[0])
