"""The ``Evaluator``, which measures models on suites, the user's files and generated tasks.

    results = Evaluator(benchmarks=["tiny"], model="gym-nano").run()
    results["tiny_arithmetic"]["exact_match"]

Every outcome is written before the next is computed, so that the same call resumes an interrupted run. Existing results
are read from their records.
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.harness.preparation import Preparation, computed, harness_version, require_harness
from gym_fed.evaluation.harness.sources import (
    PreparedRequest,
    PromptOptions,
    TaskSource,
    applies_template,
    is_own,
    own_rows,
    require_answers,
)
from gym_fed.evaluation.records.document import paths_of, record_id
from gym_fed.evaluation.results import EvalResults
from gym_fed.evaluation.running import RunningFile, evaluation_lock
from gym_fed.evaluation.scoring.models import (
    ModelRequest,
    OpenModels,
    open_models,
    resolve_model,
    template_digest,
)

if TYPE_CHECKING:
    from gym_fed.evaluation.leaderboard.lines import Line
    from gym_fed.evaluation.scoring.scorer import Scorer
    from gym_fed.evaluation.suites.eval_task import EvalTask

OUT = Path("evals")


@dataclass(frozen=True)
class SubmittableResults(EvalResults):
    """Results of an ``Evaluator``, which can be submitted to a leaderboard."""

    def submit_to_leaderboard(
        self,
        *,
        model_name: str,
        organization: str,
        board: str | Path = "leaderboard.jsonl",
        registry: str | Path | None = None,
    ) -> Line:
        """Sign the results with the home's key and append them to a board, local or in a registry.

        Arguments and errors are those of ``leaderboard.submissions.submit``.
        """
        from gym_fed.evaluation.leaderboard.submissions import submit

        return submit(self, model_name=model_name, organization=organization, board=board, registry=registry)


@dataclass(frozen=True)
class Progress:
    """The progress of a run.

    Attributes:
        done: Finished requests, including those of earlier runs.
        total: All requests.
        task: The task of the last request.
    """

    done: int
    total: int
    task: str


OnProgress = Callable[[Progress], None]
Written = tuple[EvalResults, Path | None]
"""A result with the path of its record; None if none was written."""


class Evaluator:
    """Measures models on tasks.

    Args:
        benchmarks: Names of suites and tasks (``gym eval list``), task files, generated tasks (``gym data tasks``),
            whose held-out rows are used, and files of conversations.
        model: A name or folder as for ``load_model``; ``BASE:VARIANT``; a ``.gymdelta``; the result of
            ``Trainer.train``; a ``ModelRequest``, which may name many variants.
        num_examples: Maximum number of rows of each task.
        num_fewshot: Number of examples in each prompt; None for each task's own.
        apply_chat_template: True to apply the model's chat template to prompts. None: only for tasks that ask for it
            (``tiny_text`` and ``tiny_refusal``), if the model has one; lm-evaluation-harness applies none by default.
        data: Folder of evaluation sets, which is searched before the fetched ones.
        out: Folder of records; None writes no records, and the run cannot be resumed.
        fresh: True to ignore existing records.
        on_progress: Called after every request.

    Attributes:
        cached: After a run: names of the models whose results were read from records.
        records: After a run: the path of each model's record; empty without ``out``.

    Raises:
        GymError: ``MISSING_DEPENDENCY`` without the extra ``eval``; errors from ``tasks_of`` and ``resolve_model``;
            ``FILE_EXISTS`` for an ``out`` that is a file.
    """

    def __init__(
        self,
        benchmarks: Sequence[str],
        model: Any,
        *,
        num_examples: int | None = None,
        num_fewshot: int | None = None,
        apply_chat_template: bool | None = None,
        data: str | Path | None = None,
        out: str | Path | None = None,
        fresh: bool = False,
        on_progress: OnProgress = lambda progress: None,
    ) -> None:
        if not benchmarks:
            raise GymError(ErrorCode.USAGE, "no benchmarks given", "gym eval list shows the available ones")
        require_harness()
        self.benchmarks = list(benchmarks)
        self.options = PromptOptions(num_fewshot, num_examples, apply_chat_template)
        self._out = None if out is None else Path(out)
        if self._out is not None and self._out.exists() and not self._out.is_dir():
            raise GymError(
                ErrorCode.FILE_EXISTS,
                f"{self._out} is a file, not a folder",
                "choose a folder for the records",
            )
        self._data = None if data is None else Path(data)
        self._fresh = fresh
        self.on_progress = on_progress
        self.cached: set[str] = set()
        self.records: dict[str, Path] = {}
        self.model = resolve_model(model if isinstance(model, ModelRequest) else ModelRequest(model))
        self._own = [name for name in self.benchmarks if is_own(name)]
        self._specs = self._suite_tasks(self._data)

    @property
    def group_of(self) -> dict[str, str]:
        """The group of each task of the suites; ungrouped tasks map to their own name."""
        return {task.name: task.group for task in self._specs}

    def run(self) -> SubmittableResults:
        """Evaluate the model; with several models, return the first one's results.

        Raises:
            GymError: Errors of ``open_models``, ``Preparation`` and the scorer; ``BUSY`` while another process runs the
                same evaluation.
            KeyboardInterrupt: On Ctrl-C; the same call resumes.
        """
        return next(iter(self.run_all().values()))

    def run_all(self) -> dict[str, SubmittableResults]:
        """Evaluate all models in one pass. Return the results by model name. Raises the errors of ``run``."""
        for name in self._own:
            require_answers(name, self.options.limit)
        with (
            evaluation_lock(self._locked_folder, self._options_for_lock()),
            open_models(self.model) as models,
        ):
            tokenizer = models.scorer.tokenizer
            sources: list[TaskSource] = [
                *self._specs,
                *(own_rows(name, tokenizer, self.options.limit) for name in self._own),
            ]
            identities = self._identities(models, sources)
            ids = {name: record_id(identities[name]) for name in identities}
            by_id = {ids[name]: self._recorded(identities[name]) for name in identities}
            self.cached = {models.names[name] for name in ids if by_id[ids[name]] is not None}
            # Variants with equal bytes are computed once.
            names = list({key: name for name, key in ids.items() if by_id[key] is None}.values())
            if names:
                models.scorer.only(names)
                missing = {name: identities[name] for name in names}
                by_id.update(self._computed(models, sources, missing))
            results_by_name = {}
            self.records = {}
            for name, called in models.names.items():
                recorded = by_id[ids[name]]
                assert recorded is not None
                results, path = recorded
                results_by_name[called] = SubmittableResults(**{**vars(results), "model": called})
                if path is not None:
                    self.records[called] = path
            return results_by_name

    @property
    def _locked_folder(self) -> Path | None:
        """The folder with the lock of a running evaluation; None for a model in memory."""
        return self._out if isinstance(self.model.source, str | Path) else None

    def _options_for_lock(self) -> dict[str, Any]:
        """Return the options that results depend on; the user's files are identified by path."""
        request = {name: value for name, value in vars(self.model.request).items() if name != "api_key"}
        return {**request, "benchmarks": self.benchmarks, "options": vars(self.options), "data": self._data}

    def submit_to_leaderboard(self, **board: Any) -> Line:
        """Run the evaluation and submit its results to a board: ``SubmittableResults.submit_to_leaderboard``."""
        return self.run().submit_to_leaderboard(**board)

    def _suite_tasks(self, data: Path | None) -> list[EvalTask]:
        names = [name for name in self.benchmarks if name not in self._own]
        if not names:
            return []
        from gym_fed.evaluation.suites.tasks import tasks_of

        return tasks_of(names, data, self.options.limit, num_fewshot=self.options.num_fewshot)

    def _identities(self, models: OpenModels, sources: Sequence[TaskSource]) -> dict[str, Mapping[str, str]]:
        locks = sorted((source.name, str(source.version), source.lock) for source in sources)
        has_template = bool(models.scorer.tokenizer.chat_template)
        apply = self.options.apply_chat_template
        in_template = sorted(
            source.name for source in sources if has_template and applies_template(source, apply)
        )
        suite = {
            "tasks": locks,
            "limit": self.options.limit,
            "num_fewshot": self.options.num_fewshot,
            "in_template": in_template,
        }
        shared = {
            "suite": f"sha256:{hashlib.sha256(json.dumps(suite, sort_keys=True).encode()).hexdigest()}",
            "template": template_digest(models.scorer.tokenizer, bool(in_template)),
            "decoding": "greedy",
            "harness": harness_version(),
        }
        return {name: {**models.identities[name], **shared} for name in models.scorer.models}

    def _recorded(self, identity: Mapping[str, str]) -> Written | None:
        if self._out is None or self._fresh:
            return None
        from gym_fed.evaluation.records.reader import find_record

        results = find_record(identity, self._out)
        return None if results is None else (results, paths_of(record_id(identity), self._out)[0])

    def _computed(
        self, models: OpenModels, sources: Sequence[TaskSource], identities: Mapping[str, Mapping[str, str]]
    ) -> Iterator[tuple[str, Written]]:
        """Compute and write the results of these models; return them by record id."""
        began = time.monotonic()
        scorer = models.scorer
        preparation = Preparation(sources, scorer.tokenizer, scorer.max_length, self.options)
        with RunningFile(self._out, identities) as running:
            waiting = [request for request in preparation.requests if not running.has(request.key)]
            _require_loglikelihoods(scorer, waiting)
            done = len(preparation.requests) - len(waiting)
            self.on_progress(Progress(done, len(preparation.requests), ""))
            for request, outcome in computed(scorer, preparation.requests, running.has):
                running.add(request.key, outcome)
                done += 1
                self.on_progress(Progress(done, len(preparation.requests), request.key[0]))
            seconds = time.monotonic() - began
            for name in scorer.models:
                tasks = preparation.results(running.outcomes[name])
                facts = {**_facts(), "benchmarks": self.benchmarks, "models_in_pass": len(scorer.models)}
                if len(self.benchmarks) == 1:
                    facts["suite"] = self.benchmarks[0]
                results = EvalResults(models.names[name], identities[name], tasks, seconds, facts)
                path = None
                if self._out is not None:
                    from gym_fed.evaluation.records.writer import write_record

                    path = write_record(results, self._out)
                running.remove(name)
                yield record_id(identities[name]), (results, path)


def _require_loglikelihoods(scorer: Scorer, requests: Sequence[PreparedRequest]) -> None:
    from gym_fed.evaluation.scoring.api import ApiScorer

    tasks = list(dict.fromkeys(request.key[0] for request in requests if request.continuations))
    if tasks and isinstance(scorer, ApiScorer):
        scorer.require_loglikelihoods(tasks)


def _facts() -> dict[str, Any]:
    """Return facts about the machine and its libraries."""
    from importlib.metadata import version

    import torch

    return {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        **{name: version(name) for name in ("gym-fed", "lm-eval", "torch", "transformers")},
    }
