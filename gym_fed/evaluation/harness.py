"""lm-evaluation-harness over a ``Scorer``: its tasks, prompts, tokens and metrics, our log-likelihoods and answers.

The one place that imports ``lm_eval``. A ``Preparation`` makes every request once, as tokens; what models answered goes
back in once per model. The harness's own models, caches (which pickle) and downloads are not used: rows are on this
machine before anything here runs.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import math
import os
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol

from gym_fed.errors import ErrorCode, GymError
from gym_fed.evaluation.results import Figure, SampleResult, TaskResult
from gym_fed.evaluation.scoring.scorer import AnswerRequest, AnswerResult, Continuation, Loglikelihood

LOCAL_FORMATS = ("json", "csv", "text", "parquet")
"""Values of a task's ``dataset_path`` that read files of this machine."""
MAX_PROMPT = 16_000
"""Characters of a prompt that a sample keeps."""
_BOOTSTRAP = 1000
_SEED = 1234  # of the harness: few-shot examples are drawn with it
_SAMPLING = frozenset({"until", "do_sample", "temperature", "max_gen_toks"})


class TaskSource(Protocol):
    """What is needed of a task.

    Attributes:
        name: In results.
        version: Of its definition.
        config: As lm-evaluation-harness reads it from a task's YAML; ``custom_dataset`` or ``dataset_path`` and
            ``dataset_kwargs`` give rows of this machine.
        lock: Digest of definition and data.
    """

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def lock(self) -> str: ...


@dataclass(frozen=True)
class PromptOptions:
    """How prompts are made.

    Attributes:
        num_fewshot: Examples of every prompt; None: as each task says. A task that is defined with 0 keeps 0.
        limit: Only the first so many rows of each task.
        apply_chat_template: Prompts are conversations in the template of the model, examples are turns of them.
        rows: Only these rows, by number; None for all. Their prompts are those that they have among all.
    """

    num_fewshot: int | None = None
    limit: int | None = None
    apply_chat_template: bool = False
    rows: frozenset[int] | None = None


RequestKey = tuple[str, int, int, int]
"""Task, row, number of the request in the row, repetition."""


@dataclass(frozen=True)
class PreparedRequest:
    """One request of a row, as tokens.

    Attributes:
        key: Of the request.
        continuations: To be scored and summed; more than one only for a text longer than the context.
        answer: To be answered, in place of ``continuations``.
    """

    key: RequestKey
    continuations: tuple[Continuation, ...] = ()
    answer: AnswerRequest | None = None


Outcome = Loglikelihood | AnswerResult


def require_harness() -> None:
    """Refuse where the harness is not installed.

    Raises:
        GymError: ``MISSING_DEPENDENCY``.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise GymError(
            ErrorCode.MISSING_DEPENDENCY, "evaluations need lm-eval", "pip install 'gym-fed[eval]'"
        )


class Preparation:
    """The requests of some tasks for one tokenizer.

    Args:
        sources: The tasks.
        tokenizer: Of the models.
        max_length: Their context, in tokens.
        options: How prompts are made.

    Attributes:
        requests: All of them, in the order of tasks and rows.

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
                "leave --apply-chat-template out, or set one: gym configs templates lists them",
            )
        self._tasks: dict[str, _Task] = {}
        with _offline(), _seeded():
            encoder = _encoder(tokenizer, max_length)
            for source in sources:
                self._tasks[source.name] = _Task(source, encoder, options)
        self.requests = tuple(request for task in self._tasks.values() for request in task.requests)

    def results(self, outcomes: Mapping[RequestKey, Outcome]) -> dict[str, TaskResult]:
        """Figures and samples by task, of what one model answered to every request.

        Raises:
            GymError: ``DATA_INVALID`` for a row that the task's metric cannot read.
        """
        with _offline(), _seeded():
            return {name: task.result(outcomes) for name, task in self._tasks.items()}


class _Task:
    """One task of the harness, with its instances and their requests."""

    def __init__(self, source: TaskSource, encoder: Any, options: PromptOptions) -> None:
        from lm_eval.api.task import ConfigurableTask

        _require_local(source)
        self._source = source
        config: dict[str, Any] = {"num_fewshot": 0, **deepcopy(dict(source.config)), "task": source.name}
        if options.num_fewshot is not None and source.config.get("num_fewshot") != 0:
            config["num_fewshot"] = options.num_fewshot
        self.num_fewshot = int(config["num_fewshot"] or 0)
        with _as_config_errors(source.name):
            self._task: Any = ConfigurableTask(config=config)
            self._task.set_fewshot_seed(seed=_SEED)
            self._rows = dict(self._task.doc_iterator(limit=options.limit))
            self._instances = [
                instance for number in self._rows for instance in self._asked(number, encoder, options)
            ]
            if options.rows is not None:  # after all prompts were made: their examples are drawn in turn
                self._rows = {number: row for number, row in self._rows.items() if number in options.rows}
                self._instances = [one for one in self._instances if one.doc_id in options.rows]
            self._task._instances = self._instances
        if not self._instances:
            raise GymError(ErrorCode.DATA_INVALID, f"task {source.name}: has no rows")
        self.requests = list(self._encoded(encoder))

    def _asked(self, number: int, encoder: Any, options: PromptOptions) -> list[Any]:
        """The harness's instances of one row, as its own loop makes them."""
        task, row = self._task, self._rows[number]
        template = encoder.apply_chat_template if options.apply_chat_template else None
        context = task.fewshot_context(
            row,
            num_fewshot=self.num_fewshot,
            system_instruction=None,
            apply_chat_template=options.apply_chat_template,
            fewshot_as_multiturn=options.apply_chat_template,
            chat_template=template,
            gen_prefix=task.doc_to_prefix(row),
        )
        made = task.construct_requests(
            doc=row,
            ctx=context,
            metadata=(self._source.name, number, task.config.repeats),
            apply_chat_template=options.apply_chat_template,
            chat_template=template,
        )
        return made if isinstance(made, list) else [made]

    def _encoded(self, encoder: Any) -> Iterator[PreparedRequest]:
        scored = [one for one in self._instances if one.request_type == "loglikelihood"]
        pairs = iter(encoder.loglikelihood(scored, disable_tqdm=True))
        for one in self._instances:
            for repetition in range(one.repeats):
                key = (self._source.name, one.doc_id, one.idx, repetition)
                if one.request_type == "loglikelihood":
                    pair = next(pairs) if repetition == 0 else pair
                    if not pair.continuation_ids:
                        raise GymError(
                            ErrorCode.DATA_INVALID,
                            f"task {self._source.name}: row {one.doc_id}: a choice has no tokens",
                        )
                    yield PreparedRequest(key, (pair,))
                elif one.request_type == "loglikelihood_rolling":
                    yield PreparedRequest(key, encoder.windows(one.args[0]))
                else:
                    yield PreparedRequest(key, answer=self._answer(one, encoder, key))

    def _answer(self, one: Any, encoder: Any, key: RequestKey) -> AnswerRequest:
        from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

        given: dict[str, Any] = dict(normalize_gen_kwargs(one.args[1], 256))
        samples = bool(given.get("do_sample"))
        unknown = sorted(given.keys() - _SAMPLING)
        if unknown and samples:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"task {self._source.name}: generation_kwargs: {unknown[0]} is not supported",
                f"there are {', '.join(sorted(_SAMPLING))}",
            )
        until = handle_stop_sequences(given.get("until"), eos=encoder.eos_text)
        seed = hashlib.sha256(repr(key).encode()).digest()
        return AnswerRequest(
            tuple(encoder.tok_encode_prompt(one.args[0])),
            tuple(until),
            int(given["max_gen_toks"]),
            float(given.get("temperature", 0.0)) if samples else 0.0,
            int.from_bytes(seed[:4], "big"),
        )

    def result(self, outcomes: Mapping[RequestKey, Outcome]) -> TaskResult:
        """Figures and samples of one model."""
        name = self._source.name
        by_row: dict[int, list[Any]] = defaultdict(list)
        for one in self._instances:
            found = [outcomes[name, one.doc_id, one.idx, number] for number in range(one.repeats)]
            one.resps = [_as_theirs(one, outcome) for outcome in found]
            one.filtered_resps = {}
            by_row[one.doc_id].append(one)
        self._task.apply_filters()
        values: dict[str, list[Any]] = defaultdict(list)
        metrics: dict[int, dict[str, float]] = defaultdict(dict)
        for place, filtered in enumerate(self._instances[0].filtered_resps):
            for number, row in self._rows.items():
                asked = sorted(by_row[number], key=lambda one: int(one.idx))
                with _as_data_errors(name, number):
                    found = self._task.process_results(row, [one.filtered_resps[filtered] for one in asked])
                for metric, value in found.items():
                    called = metric if place == 0 else f"{metric},{filtered}"
                    values[called].append(value)
                    metrics[number][called] = self._alone(metric, value)
        figures = {called: self._figure(called.partition(",")[0], some) for called, some in values.items()}
        samples = tuple(
            self._sample(number, by_row[number], metrics[number], outcomes) for number in self._rows
        )
        return TaskResult(
            name, str(self._source.version), self.num_fewshot, figures, samples, self._source.lock
        )

    def _aggregation(self, metric: str) -> Callable[[list[Any]], float]:
        from lm_eval.api.metrics import mean

        found: Callable[[list[Any]], float] = self._task.aggregation().get(metric, mean)
        return found

    def _alone(self, metric: str, value: Any) -> float:
        """The metric of one sample: its value, or what the aggregation makes of it alone."""
        if isinstance(value, bool | int | float):
            return float(value)
        found = self._aggregation(metric)([value])
        return float(found)

    def _figure(self, metric: str, values: list[Any]) -> Figure:
        from lm_eval.api.metrics import stderr_for_metric

        combine = self._aggregation(metric)
        error = stderr_for_metric(combine, bootstrap_iters=_BOOTSTRAP) if len(values) > 1 else None
        stderr = None if error is None else float(error(values))
        higher = bool(self._task.higher_is_better().get(metric, True))
        value = float(combine(values))
        return Figure(value, None if stderr is None or math.isnan(stderr) else stderr, len(values), higher)

    def _sample(
        self,
        number: int,
        asked: Sequence[Any],
        metrics: Mapping[str, float],
        outcomes: Mapping[RequestKey, Outcome],
    ) -> SampleResult:
        name, row = self._source.name, self._rows[number]
        found = [outcomes[name, number, one.idx, 0] for one in asked]
        prompt, choices = _shown(asked)
        answered = found[0] if isinstance(found[0], AnswerResult) else None
        return SampleResult(
            number=number,
            row_sha256=row_sha256(row),
            prompt=prompt[:MAX_PROMPT],
            choices=choices,
            logprobs=tuple(one.logprob for one in found if isinstance(one, Loglikelihood)),
            answer=None if answered is None else answered.text,
            token_ids=() if answered is None else answered.token_ids,
            target=self._target(row),
            metrics=dict(metrics),
            cut=max(one.cut for one in found),
            margins=() if answered is None else answered.margins,
        )

    def _target(self, row: Any) -> str:
        target = self._task.doc_to_target(row)
        if isinstance(target, int) and self._task.config.doc_to_choice is not None:
            choices = self._task.doc_to_choice(row)
            return str(choices[target]) if 0 <= target < len(choices) else str(target)
        return target if isinstance(target, str) else json.dumps(target, ensure_ascii=False, default=str)


def row_sha256(row: Any) -> str:
    """Digest of a row, whatever the order of its columns."""
    text = json.dumps(row, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _as_theirs(one: Any, outcome: Outcome) -> Any:
    """What a model of the harness would have returned."""
    if isinstance(outcome, AnswerResult):
        return outcome.text
    if one.request_type == "loglikelihood_rolling":
        return outcome.logprob
    return outcome.logprob, outcome.is_greedy


def _shown(asked: Sequence[Any]) -> tuple[str, tuple[str, ...]]:
    """Prompt and choices; where the choices are in the prompts, the prompt is what these begin with."""
    if asked[0].request_type == "generate_until":
        return str(asked[0].args[0]), ()
    if asked[0].request_type == "loglikelihood_rolling":
        return "", (str(asked[0].args[0]),)
    prompt = os.path.commonprefix([str(one.args[0]) for one in asked])
    return prompt, tuple(str(one.args[0])[len(prompt) :] + str(one.args[1]) for one in asked)


def _encoder(tokenizer: Any, max_length: int) -> Any:
    """The harness's own rules for tokens (its ``TemplateLM``, and what its ``HFLM`` adds), without a model."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import has_bos_prefix
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    def one(context: Sequence[int | None], ids: Sequence[int]) -> Continuation:
        if context[0] is None:
            raise GymError(
                ErrorCode.UNAVAILABLE,
                "a text is scored from its first word on, and the tokenizer has no token to begin with",
                "evaluate the model's folder, or leave the task out",
            )
        return Continuation(tuple(int(token or 0) for token in context), tuple(ids))

    class Encoder(TemplateLM):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.tokenizer = tokenizer

        @property
        def eot_token_id(self) -> int | None:
            found: int | None = tokenizer.eos_token_id
            return found

        @property
        def prefix_token_id(self) -> int | None:
            found: int | None = tokenizer.bos_token_id
            return self.eot_token_id if found is None else found

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
            return list(tokenizer.encode(string, **({"add_special_tokens": False} if bare else {})))

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> Any:
            return [one(context, ids) for _text, context, ids in requests]

        def windows(self, text: str) -> tuple[Continuation, ...]:
            parts = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=max_length,
                context_len=1,
            )
            return tuple(one(context, ids) for context, ids in map(make_disjoint_window, parts))

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
            return [self.windows(one.args[0]) for one in requests]

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
            raise AssertionError("answers are requested from the scorer")

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
            except jinja2.exceptions.TemplateError:  # as HFLM does: some templates refuse the system role
                return rendered([turn for turn in chat_history if turn["role"] != "system"])

    return Encoder()


def _require_local(source: TaskSource) -> None:
    """Refuse what would make the harness ask a network.

    Raises:
        GymError: ``CONFIG_INVALID``.
    """
    from lm_eval.api.registry import METRIC_REGISTRY

    def refused(what: str) -> GymError:
        return GymError(
            ErrorCode.CONFIG_INVALID,
            f"task {source.name}: {what}",
            "evaluations run without a network: give files of this machine and metrics of lm-eval itself",
        )

    config = source.config
    path = config.get("dataset_path")
    if not callable(config.get("custom_dataset")) and path not in LOCAL_FORMATS:
        raise refused(f"dataset_path: {path!r} is not one of {', '.join(LOCAL_FORMATS)}")
    files = json.dumps((config.get("dataset_kwargs") or {}).get("data_files", ""), default=str)
    if "://" in files:
        raise refused("dataset_kwargs: data_files: names an address")
    if config.get("use_prompt"):
        raise refused("use_prompt: is not supported")
    for entry in config.get("metric_list") or ():
        metric = entry.get("metric")
        known = callable(metric) or config.get("process_results") is not None
        if entry.get("hf_evaluate") or not (known or metric in METRIC_REGISTRY):
            raise refused(f"metric_list: {metric!r} is not a metric of lm-eval itself")


@contextmanager
def _offline() -> Iterator[None]:
    """Nothing in here may use a network: the libraries read the variables once, and their modules keep the values."""
    import datasets
    import huggingface_hub.constants

    places: list[tuple[Any, str]] = [
        (huggingface_hub.constants, "HF_HUB_OFFLINE"),
        (datasets.config, "HF_HUB_OFFLINE"),
        (datasets.config, "HF_DATASETS_OFFLINE"),
    ]
    before = [(module, name, getattr(module, name)) for module, name in places if hasattr(module, name)]
    serial = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"  # the harness would bootstrap errors in a process for every core
    bars = datasets.are_progress_bars_disabled()
    log = logging.getLogger("lm_eval")
    level = log.level
    log.setLevel(logging.ERROR)  # its warnings are advice to those who write tasks
    for module, name, _ in before:
        setattr(module, name, True)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
        log.setLevel(level)
        if not bars:
            datasets.enable_progress_bars()
        if serial is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = serial


@contextmanager
def _seeded() -> Iterator[None]:
    """The seeds that the harness sets, for tasks that shuffle their rows; the caller's state comes back."""
    import numpy as np

    plain, arrays = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(_SEED)
    try:
        yield
    finally:
        random.setstate(plain)
        np.random.set_state(arrays)


@contextmanager
def _as_config_errors(name: str) -> Iterator[None]:
    try:
        yield
    except GymError:
        raise
    except Exception as error:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"task {name}: lm-eval refuses it: {type(error).__name__}: {str(error)[:500]}",
            "compare its file with its data",
        ) from error


@contextmanager
def _as_data_errors(name: str, number: int) -> Iterator[None]:
    try:
        yield
    except GymError:
        raise
    except Exception as error:
        raise GymError(
            ErrorCode.DATA_INVALID,
            f"task {name}: row {number}: its metric fails: {type(error).__name__}: {str(error)[:500]}",
            "compare the row with the task's file",
        ) from error
