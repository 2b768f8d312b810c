"""Prepare the requests of tasks once, and compute metrics from each model's outcomes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.harness.isolation import (
    offline,
    patterns_bounded,
    register_bounded_filter,
    seeded,
    templates_kept,
)
from gym_fed.evaluation.harness.sources import Outcome, PreparedRequest, PromptOptions, RequestKey, TaskSource
from gym_fed.evaluation.harness.task import HarnessTask
from gym_fed.evaluation.results import TaskResult
from gym_fed.evaluation.scoring.scorer import Continuation, Loglikelihood, Scorer

_MAX_CHARACTERS_PER_TOKEN = 64
"""Only the end of a longer prompt is encoded, since its beginning does not fit in the context."""


def require_harness() -> None:
    """Require the harness to be installed.

    Raises:
        GymError: ``MISSING_DEPENDENCY``.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise GymError(
            ErrorCode.MISSING_DEPENDENCY, "evaluations need lm-eval", "pip install 'gym-fed[eval]'"
        )


def harness_version() -> str:
    """Return the version of lm-evaluation-harness, on which prompts and metrics depend."""
    return f"lm-eval {version('lm-eval')}"


class Preparation:
    """The requests of some tasks for one tokenizer.

    Args:
        max_length: The models' context in tokens.

    Attributes:
        requests: All requests, ordered by task and row.

    Raises:
        GymError: ``MISSING_DEPENDENCY``; ``CONFIG_INVALID`` for a task that would use a network, or that the harness
            refuses; ``USAGE`` for a chat template that the tokenizer does not have.
    """

    def __init__(
        self, sources: Sequence[TaskSource], tokenizer: Any, max_length: int, options: PromptOptions
    ) -> None:
        require_harness()
        if options.apply_chat_template and not tokenizer.chat_template:
            raise GymError(
                ErrorCode.USAGE,
                "the tokenizer has no chat template",
                "omit --apply-chat-template, or set a template: gym configs templates lists them",
            )
        self._tasks: dict[str, HarnessTask] = {}
        register_bounded_filter()
        with offline(), seeded(), templates_kept():
            encoder = encoder_of(tokenizer, max_length)
            for source in sources:
                self._tasks[source.name] = HarnessTask(source, encoder, options)
        self.requests = tuple(request for task in self._tasks.values() for request in task.requests)

    def results(self, outcomes: Mapping[RequestKey, Outcome]) -> dict[str, TaskResult]:
        """Compute metrics and samples by task from one model's outcomes.

        Raises:
            GymError: ``DATA_INVALID`` for a row that the task's metric cannot read.
        """
        with offline(), seeded(), templates_kept(), patterns_bounded():
            return {name: task.result(outcomes) for name, task in self._tasks.items()}


def encoder_of(tokenizer: Any, max_length: int) -> Any:
    """Create the harness's encoder (its ``TemplateLM`` and the additions of ``HFLM``) without a model."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import has_bos_prefix
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    def continuation(context: Sequence[int | None], ids: Sequence[int]) -> Continuation:
        if context[0] is None:
            raise GymError(
                ErrorCode.UNAVAILABLE,
                "the first word of a text is scored, but the tokenizer has no BOS or EOS token to precede it",
                "evaluate the model's folder, or omit the task",
            )
        return Continuation(tuple(int(token or 0) for token in context), tuple(ids))

    max_characters = max_length * _MAX_CHARACTERS_PER_TOKEN

    class Encoder(TemplateLM):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.tokenizer = tokenizer

        @property
        def eot_token_id(self) -> int | None:
            token_id: int | None = tokenizer.eos_token_id
            return token_id

        @property
        def prefix_token_id(self) -> int | None:
            token_id: int | None = tokenizer.bos_token_id
            return self.eot_token_id if token_id is None else token_id

        @property
        def eos_text(self) -> str | None:
            return None if tokenizer.eos_token_id is None else str(tokenizer.decode(tokenizer.eos_token_id))

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            if add_special_tokens is None and has_bos_prefix(string, tokenizer.decode(self.prefix_token_id)):
                add_special_tokens = False
            special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
            return list(tokenizer.encode(string, **special))

        def tok_encode_prompt(self, string: str) -> list[int]:
            bare = has_bos_prefix(string, tokenizer.bos_token)
            return list(
                tokenizer.encode(self._end(string), **({"add_special_tokens": False} if bare else {}))
            )

        def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
            context = self._end(context)
            head, tail = super()._encode_pair(context, continuation)
            if context != context.rstrip():
                # A template's last token may contain the line end, such as gym-nano's "<|im_start|>assistant\n". The
                # harness would strip the line end, and count the tokens of a different text.
                ids, context_ids = self.tok_encode(context + continuation), self.tok_encode(context)
                if ids[: len(head)] != head and ids[: len(context_ids)] == context_ids:
                    return context_ids, ids[len(context_ids) :]
            return head, tail

        def _end(self, text: str) -> str:
            """Return the end of a very long text that fills the context; other texts unchanged."""
            end = text[-max_characters:]
            return end if end == text or len(tokenizer.encode(end)) > max_length + 1 else text

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> Any:
            return [continuation(context, ids) for _text, context, ids in requests]

        def windows(self, text: str) -> tuple[Continuation, ...]:
            parts = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=max_length,
                context_len=1,
            )
            return tuple(continuation(context, ids) for context, ids in map(make_disjoint_window, parts))

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
            return [self.windows(request.args[0]) for request in requests]

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
            raise AssertionError("unreachable: answers are requested from the scorer")

        def apply_chat_template(
            self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
        ) -> str:
            import jinja2

            def rendered(messages: list[dict[str, str]]) -> str:
                return str(
                    tokenizer.apply_chat_template(
                        messages,
                        tokenize=False,
                        add_generation_prompt=add_generation_prompt,
                        continue_final_message=not add_generation_prompt,
                    )
                )

            try:
                return rendered(chat_history)
            except jinja2.exceptions.TemplateError:  # same as HFLM: some templates refuse the system role
                return rendered([turn for turn in chat_history if turn["role"] != "system"])

    return Encoder()


def computed(
    scorer: Scorer,
    requests: Sequence[PreparedRequest],
    is_done: Callable[[RequestKey], bool] = lambda key: False,
) -> Iterator[tuple[PreparedRequest, Mapping[str, Outcome]]]:
    """Yield each open request with its outcomes by model; the parts of a text longer than the context are summed."""
    scored = [request for request in requests if request.continuations]
    parts = [(number, part) for number, request in enumerate(scored) for part in request.continuations]
    sums: dict[int, dict[str, Loglikelihood]] = {}
    left = {number: len(request.continuations) for number, request in enumerate(scored)}
    done = {place for place, (number, _) in enumerate(parts) if is_done(scored[number].key)}
    for place, by_model in scorer.loglikelihoods([part for _, part in parts], done):
        number = parts[place][0]
        before = sums.get(number)
        sums[number] = dict(by_model) if before is None else _summed(before, by_model)
        left[number] -= 1
        if not left[number]:
            yield scored[number], sums.pop(number)
    prompts = [request for request in requests if request.answer is not None and not is_done(request.key)]
    for place, answers in scorer.answers([request.answer for request in prompts if request.answer]):
        yield prompts[place], answers


def _summed(first: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: replace(
            first[name],
            logprob=first[name].logprob + other[name].logprob,
            is_greedy=first[name].is_greedy and other[name].is_greedy,
            cut=first[name].cut + other[name].cut,
        )
        for name in first
    }
