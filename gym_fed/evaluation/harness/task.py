"""A task of the harness: its instances, their requests, and its metrics."""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.harness.isolation import SEED, as_gym_error
from gym_fed.evaluation.harness.sources import (
    Outcome,
    PreparedRequest,
    PromptOptions,
    RequestKey,
    TaskSource,
    applies_template,
    is_rendered,
    require_local,
    row_sha256,
)
from gym_fed.evaluation.results import Figure, SampleResult, TaskResult
from gym_fed.evaluation.scoring.scorer import AnswerRequest, AnswerResult, Loglikelihood

MAX_PROMPT = 16_000
"""Maximum number of characters of the prompt in a sample."""
_BOOTSTRAP = 1000

_SAMPLING = frozenset({"until", "do_sample", "temperature", "max_gen_toks"})


class HarnessTask:
    """A task with its instances and their requests."""

    def __init__(self, source: TaskSource, encoder: Any, options: PromptOptions) -> None:
        from lm_eval.api.task import ConfigurableTask

        require_local(source)
        self._source = source
        config: dict[str, Any] = {"num_fewshot": 0, **deepcopy(dict(source.config)), "task": source.name}
        if options.num_fewshot is not None and source.config.get("num_fewshot") != 0:
            config["num_fewshot"] = options.num_fewshot
        self.num_fewshot = int(config["num_fewshot"] or 0)
        self.chat_template = bool(encoder.tokenizer.chat_template) and applies_template(
            source, options.apply_chat_template
        )
        refused = f"task {source.name}: rejected by lm-eval"
        with as_gym_error(ErrorCode.CONFIG_INVALID, refused, "check its file against its data"):
            self._task: Any = ConfigurableTask(config=config)
            self._task.set_fewshot_seed(seed=SEED)
            rows = dict(self._task.doc_iterator(limit=options.limit))
            chosen = set(rows) if options.rows is None else set(options.rows(source.name, len(rows)))
            self._rows = {number: row for number, row in rows.items() if number in chosen}
            # Few-shot examples are drawn in order, so those of a row depend on all rows before it.
            needed = {n: r for n, r in rows.items() if n <= max(chosen)} if self.num_fewshot else self._rows
            self._instances = [
                instance
                for number, row in needed.items()
                for instance in self._row_instances(number, row, encoder)
                if number in chosen
            ]
            self._task._instances = self._instances
        if not self._instances:
            raise GymError(ErrorCode.DATA_INVALID, f"task {source.name} has no rows")
        self.requests = list(self._encoded(encoder))

    def _row_instances(self, number: int, row: Any, encoder: Any) -> list[Any]:
        """Create the instances of one row in the same way as the harness."""
        task = self._task
        template = encoder.apply_chat_template if self.chat_template else None
        context = task.fewshot_context(
            row,
            num_fewshot=self.num_fewshot,
            system_instruction=None,
            apply_chat_template=self.chat_template,
            fewshot_as_multiturn=self.chat_template,
            chat_template=template,
            gen_prefix=task.doc_to_prefix(row),
        )
        instances = task.construct_requests(
            doc=row,
            ctx=context,
            metadata=(self._source.name, number, task.config.repeats),
            apply_chat_template=self.chat_template,
            chat_template=template,
        )
        return instances if isinstance(instances, list) else [instances]

    def _encoded(self, encoder: Any) -> Iterator[PreparedRequest]:
        scored = [instance for instance in self._instances if instance.request_type == "loglikelihood"]
        pairs = iter(encoder.loglikelihood(scored, disable_tqdm=True))
        for instance in self._instances:
            pair = next(pairs) if instance.request_type == "loglikelihood" else None
            for repetition in range(instance.repeats):
                key = (self._source.name, instance.doc_id, instance.idx, repetition)
                if pair is not None:
                    if not pair.continuation_ids:
                        raise GymError(
                            ErrorCode.DATA_INVALID,
                            f"task {self._source.name}: row {instance.doc_id}: a choice has no tokens",
                        )
                    yield PreparedRequest(key, (pair,))
                elif instance.request_type == "loglikelihood_rolling":
                    yield PreparedRequest(key, encoder.windows(instance.args[0]))
                else:
                    yield PreparedRequest(key, answer=self._answer(instance, encoder, key))

    def _answer(self, instance: Any, encoder: Any, key: RequestKey) -> AnswerRequest:
        from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

        given: dict[str, Any] = dict(normalize_gen_kwargs(instance.args[1], 256))
        samples = bool(given.get("do_sample"))
        unknown = sorted(given.keys() - _SAMPLING)
        if unknown and samples:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"task {self._source.name}: generation_kwargs: {unknown[0]} is not supported",
                f"use {', '.join(sorted(_SAMPLING))}",
            )
        until = handle_stop_sequences(given.get("until"), eos=encoder.eos_text)
        seed = hashlib.sha256(repr(key).encode()).digest()
        return AnswerRequest(
            tuple(encoder.tok_encode_prompt(instance.args[0])),
            tuple(until),
            int(given["max_gen_toks"]),
            float(given.get("temperature", 0.0)) if samples else 0.0,
            int.from_bytes(seed[:4], "big"),
        )

    def result(self, outcomes: Mapping[RequestKey, Outcome]) -> TaskResult:
        """Compute one model's metrics and samples."""
        name = self._source.name
        by_row: dict[int, list[Any]] = defaultdict(list)
        for instance in self._instances:
            outcomes_of_instance = [
                outcomes[name, instance.doc_id, instance.idx, number] for number in range(instance.repeats)
            ]
            instance.resps = [_harness_response(instance, outcome) for outcome in outcomes_of_instance]
            instance.filtered_resps = {}
            by_row[instance.doc_id].append(instance)
        self._task.apply_filters()
        values: dict[str, list[Any]] = defaultdict(list)
        metrics: dict[int, dict[str, float]] = defaultdict(dict)
        for place, filtered in enumerate(self._instances[0].filtered_resps):
            for number, row in self._rows.items():
                instances = sorted(by_row[number], key=lambda instance: int(instance.idx))
                failed = f"task {name}: row {number}: its metric failed"
                with as_gym_error(ErrorCode.DATA_INVALID, failed, "check the row against the task's file"):
                    row_metrics = self._task.process_results(
                        row, [instance.filtered_resps[filtered] for instance in instances]
                    )
                for metric, value in row_metrics.items():
                    key = metric if place == 0 else f"{metric},{filtered}"
                    values[key].append(value)
                    metrics[number][key] = self._sample_value(metric, value)
        figures = {key: self._figure(key.partition(",")[0], column) for key, column in values.items()}
        samples = tuple(
            self._sample(number, by_row[number], metrics[number], outcomes) for number in self._rows
        )
        return TaskResult(
            name,
            str(self._source.version),
            self.num_fewshot,
            figures,
            samples,
            self._source.lock,
            self.chat_template or is_rendered(self._source),
        )

    def _aggregation(self, metric: str) -> Callable[[list[Any]], float]:
        from lm_eval.api.metrics import mean

        aggregate: Callable[[list[Any]], float] = self._task.aggregation().get(metric, mean)
        return aggregate

    def _sample_value(self, metric: str, value: Any) -> float:
        """Return the metric of a single sample; a value that is not a number is aggregated alone."""
        return float(value if isinstance(value, bool | int | float) else self._aggregation(metric)([value]))

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
        instances: Sequence[Any],
        metrics: Mapping[str, float],
        outcomes: Mapping[RequestKey, Outcome],
    ) -> SampleResult:
        name, row = self._source.name, self._rows[number]
        results = [outcomes[name, number, instance.idx, 0] for instance in instances]
        prompt, choices = _prompt_and_choices(instances)
        answered = results[0] if isinstance(results[0], AnswerResult) else None
        return SampleResult(
            number=number,
            row_sha256=row_sha256(row),
            prompt=prompt[:MAX_PROMPT],
            choices=choices,
            logprobs=tuple(result.logprob for result in results if isinstance(result, Loglikelihood)),
            answer=None if answered is None else answered.text,
            token_ids=() if answered is None else answered.token_ids,
            target=self._target(row),
            metrics=dict(metrics),
            cut=max(result.cut for result in results),
            margins=() if answered is None else answered.margins,
            thought="" if answered is None else answered.thought,
            is_unfinished=answered is not None and answered.is_unfinished,
        )

    def _target(self, row: Any) -> str:
        target = self._task.doc_to_target(row)
        if isinstance(target, int) and self._task.config.doc_to_choice is not None:
            choices = self._task.doc_to_choice(row)
            return str(choices[target]) if 0 <= target < len(choices) else str(target)
        return target if isinstance(target, str) else json.dumps(target, ensure_ascii=False, default=str)


def _harness_response(instance: Any, outcome: Outcome) -> Any:
    """Convert an outcome to the form that a model of the harness would return."""
    if isinstance(outcome, AnswerResult):
        return outcome.text
    if instance.request_type == "loglikelihood_rolling":
        return outcome.logprob
    return outcome.logprob, outcome.is_greedy


def _prompt_and_choices(instances: Sequence[Any]) -> tuple[str, tuple[str, ...]]:
    """Return prompt and choices; if prompts contain the choices, the prompt is their common prefix."""
    kind, texts = instances[0].request_type, [str(instance.args[0]) for instance in instances]
    if kind == "generate_until":
        return texts[0], ()
    if kind == "loglikelihood_rolling":
        return "", (texts[0],)
    first, *others = texts
    length = next(
        (n for n in range(len(first)) if any(text[n : n + 1] != first[n] for text in others)), len(first)
    )
    endings = (str(instance.args[1]) for instance in instances)
    return first[:length], tuple(text[length:] + end for text, end in zip(texts, endings, strict=True))
