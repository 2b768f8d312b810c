"""Knowledge distillation: the student learns the teacher's distribution at every token.

``L = D_beta(teacher, student)`` in nats per token (``divergence``), on the data's answers or the student's own: Agarwal
et al. 2024, "On-Policy Distillation of Language Models" (GKD), equations 1 and 2; Hinton et al. 2015 for the
temperature (the loss is not multiplied by its square).
"""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from gym_fed.config.algorithms.supervised import DistillationSettings
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted, plain
from gym_fed.data.encoding import IGNORED
from gym_fed.data.rows import Row
from gym_fed.training.algorithms.base import Algorithm
from gym_fed.training.algorithms.sft import Sft as _Sft
from gym_fed.training.run.job import Job

if TYPE_CHECKING:
    from torch import Tensor


_HINT = "choose a teacher of the student's family, or algorithm: sequence_distillation, where they may differ"


class Distillation(Algorithm):
    """Distillation with TRL's ``GKDTrainer``; the teacher is a model name or folder."""

    keeps_encoded = False  # encoding compares vocabularies with the teacher's
    tried = "full; off-policy and on-policy"
    untried = "adapters"

    @classmethod
    def logits(cls, config: TrainingConfig) -> Literal["tiled", "whole", "none"]:
        return "whole"

    @classmethod
    def writes_answers(cls, config: TrainingConfig) -> bool:
        assert config.distillation is not None  # filled in by the config
        return config.distillation.lmbda > 0

    def loss_measures_rows(self, config: TrainingConfig) -> bool:
        return not self.writes_answers(config)  # on-policy answers are the student's own

    def check(self, config: TrainingConfig) -> None:
        from gym_fed.base.models import resolve

        settings = self.settings(config)
        resolve(settings.teacher)
        if settings.lmbda and (config.packing or config.assistant_only_loss is False):
            key = "packing" if config.packing else "assistant_only_loss"
            reason = f"distillation.lmbda: {settings.lmbda} needs rows with a prompt, which {key} removes"
            raise GymError(ErrorCode.CONFIG_INVALID, reason, f"remove {key}, or set distillation.lmbda: 0")

    def encode(self, config: TrainingConfig, tokenizer: Any, rows: list[Row]) -> list[dict[str, Any]]:
        from gym_fed.base.models import load_tokenizer

        settings = self.settings(config)
        ours, theirs = tokenizer.get_vocab(), load_tokenizer(settings.teacher).get_vocab()
        if (differs := _first_difference(ours, theirs)) is not None:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"distillation.teacher: {settings.teacher} has {counted(len(theirs), 'token')}, but the student has "
                f"{len(ours):,}; {differs}",
                _HINT,
            )
        encoded = _Sft().encode(config, tokenizer, rows)
        for number, row in enumerate(encoded, start=1):
            row["prompt_length"] = _prompt_length(row["labels"])
            if settings.lmbda and not row["prompt_length"]:
                reason = f"row {number} has no prompt that the student could answer"
                remedy = "give conversations, or set distillation.lmbda: 0"
                raise GymError(ErrorCode.DATA_INVALID, reason, remedy)
        return encoded

    def build(self, job: Job) -> Any:
        from gym_fed.training.trl_glue import local

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "You are importing from 'trl.experimental'")
            from trl.experimental.gkd import GKDConfig

            from gym_fed.training.algorithms.distillation._trainer import DistillationTrainer

        settings = self.settings(job.config)
        arguments = GKDConfig(
            **job.arguments(),
            max_length=job.config.max_length,
            beta=settings.beta,
            temperature=settings.temperature,
            lmbda=settings.lmbda,
            max_new_tokens=settings.max_completion_length,
            disable_dropout=False,  # the config sets lora_dropout
        )
        teacher, rows = _teacher(job, settings)
        return local(DistillationTrainer)(
            model=job.model,
            teacher_model=teacher,
            divergence=partial(divergence, beta=settings.beta, temperature=settings.temperature),
            tokens=token_columns(job.tokenizer, rows),
            args=arguments,
            processing_class=job.tokenizer,
            callbacks=job.callbacks,
            **job.datasets(),
        )


def divergence(student: Tensor, teacher: Tensor, *, beta: float, temperature: float) -> Tensor:
    """Return the generalised Jensen-Shannon divergence of GKD's equation 1, summed over positions.

    ``D_beta(p || q) = beta * KL(p || m) + (1 - beta) * KL(q || m)`` with ``m = beta * p + (1 - beta) * q``; ``p`` is
    the teacher's distribution, ``q`` the student's. ``beta`` 0 is ``KL(p || q)``, 1 is ``KL(q || p)`` (section 2).

    Args:
        student: ``[n, vocabulary]`` logits.
        teacher: The same for the teacher.
        beta: Weight of the teacher in the mixture ``m``.
        temperature: Divisor of the logits of student and teacher.

    Returns:
        A scalar float32, in nats.
    """
    import torch

    log_p, log_q = ((logits.float() / temperature).log_softmax(-1) for logits in (teacher, student))
    if beta == 0:
        return _kl(log_p, log_q)
    if beta == 1:
        return _kl(log_q, log_p)
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    return beta * _kl(log_p, log_m) + (1 - beta) * _kl(log_q, log_m)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return ``KL(p || q)`` of ``[n, vocabulary]`` log-probabilities, summed over ``n``."""
    return (log_p.exp() * (log_p - log_q)).sum()


def _prompt_length(labels: list[int]) -> int:
    """Return the number of tokens before the last answer, the last run of labels."""
    end = max(i for i, label in enumerate(labels) if label != IGNORED)
    while end >= 0 and labels[end] != IGNORED:
        end -= 1
    return end + 1


def _teacher(job: Job, settings: DistillationSettings) -> tuple[Any, int]:
    """Return the frozen teacher, and the number of embedding rows that both models have."""
    from gym_fed.base.models import load_model

    device, dtype = str(next(job.model.parameters()).device), settings.teacher_dtype or job.config.dtype
    teacher = load_model(settings.teacher, dtype=dtype, device=device).model
    teacher.requires_grad_(False)
    theirs, ours = (model.config.get_text_config().vocab_size for model in (teacher, job.model))
    largest = max(max(row["input_ids"]) for row in (*job.encoded, *(job.eval_encoded or ())))
    if largest >= theirs:
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"distillation.teacher: {settings.teacher} has {counted(theirs, 'row')} of embeddings, but the data "
            f"has the token {largest:,}",
            "restore its weights and tokenizer, or choose another teacher",
        )
    # TRL refuses models whose vocab_size differs; nothing else reads it, since the teacher is not saved.
    teacher.config.get_text_config().vocab_size = ours
    return teacher.eval(), min(theirs, ours)


def token_columns(tokenizer: Any, rows: int) -> slice | list[int]:
    """Return the columns of the logits that belong to tokens and have an embedding row in both models.

    Models of one family pad their embeddings to different sizes (Qwen2.5 has 151,665 tokens, and 151,936 rows at 0.5B
    and 152,064 at 7B). The logits of padding rows belong to no token and are never trained, so they are excluded from
    the softmax of teacher and student.

    Args:
        tokenizer: Tokenizer of both models. It may have tokens without a row, such as Gemma 3 1B's image token.
        rows: Number of rows of the smaller of the two embeddings.
    """
    ids = sorted({number for number in tokenizer.get_vocab().values() if number < rows})
    return slice(len(ids)) if ids[-1] == len(ids) - 1 else ids


def _first_difference(ours: dict[str, int], theirs: dict[str, int]) -> str | None:
    """Describe the lowest id whose token differs between the vocabularies; None if they are equal."""
    student, teacher = ({number: token for token, number in vocab.items()} for vocab in (ours, theirs))
    for number in sorted({*student, *teacher}):
        pair = teacher.get(number), student.get(number)
        if pair[0] != pair[1]:
            tokens = ("no token" if token is None else repr(plain(token, 40)) for token in pair)
            return "id {} is {} for the teacher and {} for the student".format(number, *tokens)
    return None if ours == theirs else "a token has two ids"
