"""The sides of `evaluation.py`, each in its own process: our pass over all variants, and HFLM on each merged variant.

python benchmarks/_evaluation_sides.py ours|theirs|batch|tiny SETTINGS
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _serving_models import random_signs
from torch import Tensor

from gym_fed.base.models import LoadedModel, load_model
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.file import DeltaFile, apply_delta
from gym_fed.evaluation.suites.eval_task import EvalTask
from gym_fed.evaluation.suites.tasks import tasks_of

SHARE = 0.1
"""Scale of a variant relative to a matrix's mean absolute weight, at which choices differ but answers remain text."""
BATCH_SIZES = (1, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Settings:
    """Settings of both sides.

    Attributes:
        model: Id or folder of the base.
        variants: Number of variants.
        tasks: Names of tasks, by kind: ``choices`` and ``texts``.
        rows: Number of rows, by kind of task.
        data: Folder of evaluation sets; None for the tasks in the package.
        folder: Folder of the variants' files.
        batch_sizes: Batch sizes of HFLM, by kind of task.
    """

    model: str
    variants: int
    tasks: Mapping[str, str]
    rows: Mapping[str, int]
    data: str | None
    folder: str
    threads: int
    batch_sizes: Mapping[str, int]


def one_bit_files(loaded: LoadedModel, folder: Path, count: int) -> list[Path]:
    """Write variants of a base with random signs and one scale per row for every matrix; return their paths."""
    base = BaseSpec.of(loaded.model, loaded.name)
    tensors = dict(loaded.model.named_parameters())

    def scales(name: str, rows: int) -> Tensor:
        means: Tensor = tensors[name].detach().abs().mean(dim=1, keepdim=True)
        return SHARE * means

    return [random_signs(base, folder / f"v{n:02}.gymdelta", n, scales) for n in range(count)]


def task_of(settings: Settings, kind: str, *, other_rows: bool = False) -> EvalTask:
    """Return the task with its first rows or, for choosing a batch size, with up to as many later rows."""
    data = None if settings.data is None else Path(settings.data)
    (task,) = tasks_of([settings.tasks[kind]], data)
    rows = task.rows[task.split]
    count = settings.rows[kind]
    kept = rows[count : 2 * count] if other_rows else rows[:count]
    assert len(rows) >= 1.5 * count, f"{task.name} has too few rows"

    def table(**_: Any) -> Any:
        from datasets import Dataset, DatasetDict

        return DatasetDict({task.split: Dataset.from_list(list(kept))})

    return replace(task, config={**task.config, "custom_dataset": table}, rows={task.split: kept})


@dataclass
class Outcome:
    """The result of one pass: total and model seconds, and the answer of each variant to each row."""

    seconds: float
    model_seconds: float
    forwards: int
    said: dict[str, list[Any]]


def ours(settings: Settings, kinds: Sequence[str]) -> dict[str, Any]:
    """Run one pass of our evaluator over all variants, for each kind of task."""
    from gym_fed.evaluation.scoring.local import LocalScorer
    from gym_fed.serving.forward.multi_variant import MultiVariantModel
    from gym_fed.serving.forward.variant_weights import loaded_variant

    loaded = _loaded(settings)
    base = BaseSpec.of(loaded.model, loaded.name)
    with MultiVariantModel(loaded.model) as served:
        held = {}
        for file in one_bit_files(loaded, Path(settings.folder), settings.variants):
            with DeltaFile.open(file, base) as delta:
                held[file.stem] = loaded_variant(file.stem, delta, served.layout, file.stem)
        scorer = LocalScorer(served, loaded.tokenizer, held)
        found = {}
        for kind in kinds:
            _our_pass(replace(settings, rows={kind: 2}), kind, scorer, served)
            found[kind] = vars(_our_pass(settings, kind, scorer, served))
    return found


def _our_pass(settings: Settings, kind: str, scorer: Any, served: Any) -> Outcome:
    from gym_fed.evaluation.harness.preparation import Preparation, computed
    from gym_fed.evaluation.harness.sources import PromptOptions

    task = task_of(settings, kind)
    products = sum(served.sign_products.values())
    with _forwards(served.model) as forwards:
        began = time.process_time()
        preparation = Preparation([task], scorer.tokenizer, scorer.max_length, PromptOptions())
        middle = time.process_time()
        outcomes: dict[str, dict[Any, Any]] = {name: {} for name in scorer.models}
        for request, by_model in computed(scorer, preparation.requests):
            for name, outcome in by_model.items():
                outcomes[name][request.key] = outcome
        model_seconds = time.process_time() - middle
        said = {}
        for name in scorer.models:
            samples = preparation.results(outcomes[name])[task.name].samples
            said[name] = [list(one.logprobs) if one.answer is None else one.answer for one in samples]
        seconds = time.process_time() - began
    assert sum(served.sign_products.values()) > products, "the variants' signs were not multiplied"
    return Outcome(seconds, model_seconds, len(forwards), said)


def theirs(settings: Settings, kinds: Sequence[str]) -> dict[str, Any]:
    """Run HFLM on every variant, all merged and loaded in advance."""
    import copy

    loaded = _loaded(settings)
    base = BaseSpec.of(loaded.model, loaded.name)
    merged = {}
    for file in one_bit_files(loaded, Path(settings.folder), settings.variants):
        model = copy.deepcopy(loaded.model)
        with DeltaFile.open(file, base) as delta:
            apply_delta(model, delta)
        merged[file.stem] = model
    found = {}
    for kind in kinds:
        first = next(iter(merged.values()))
        _their_pass(
            replace(settings, rows={kind: 2}),
            kind,
            {"warm": first},
            loaded.tokenizer,
            settings.batch_sizes[kind],
        )
        found[kind] = vars(_their_pass(settings, kind, merged, loaded.tokenizer, settings.batch_sizes[kind]))
    return found


def best_batch_sizes(settings: Settings) -> dict[str, int]:
    """Return HFLM's fastest batch size for each kind of task, from the better of two tries on other rows."""
    loaded = _loaded(settings)
    found = {}
    for kind in settings.tasks:
        seconds = {}
        for size in BATCH_SIZES:
            tries = [
                _their_pass(settings, kind, {"base": loaded.model}, loaded.tokenizer, size, other_rows=True)
                for _ in range(3)
            ]
            seconds[size] = min(one.model_seconds for one in tries[1:])
        found[kind] = min(seconds, key=lambda size: seconds[size])
    return found


def _their_pass(
    settings: Settings,
    kind: str,
    models: Mapping[str, Any],
    tokenizer: Any,
    batch_size: int,
    *,
    other_rows: bool = False,
) -> Outcome:
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    task = task_of(settings, kind, other_rows=other_rows)
    sides = {
        name: HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
        for name, model in models.items()
    }
    said: dict[str, list[Any]] = {}
    forwards: list[None] = []
    seconds = model_seconds = 0.0
    for name, lm in sides.items():
        timed = _Timed(lm)
        with _forwards(models[name]) as counted:
            began = time.process_time()
            made = ConfigurableTask(config=dict(task.config))
            result: Any = evaluate(
                lm=timed.lm,
                task_dict={task.name: made},
                bootstrap_iters=0,
                log_samples=True,
                verbosity="ERROR",
            )
            seconds += time.process_time() - began
        forwards += counted
        model_seconds += timed.seconds
        by_row: dict[int, Any] = {}
        for sample in result["samples"][task.name]:
            by_row.setdefault(sample["doc_id"], sample)
        said[name] = [_said(by_row[number]) for number in sorted(by_row)]
    return Outcome(seconds, model_seconds, len(forwards), said)


def _said(sample: Mapping[str, Any]) -> Any:
    answers = [one[0] for one in sample["resps"]]
    return answers[0] if isinstance(answers[0], str) else [float(logprob) for logprob, _ in answers]


class _Timed:
    """HFLM with a timer of its requests."""

    def __init__(self, lm: Any) -> None:
        self.lm, self.seconds = lm, 0.0
        for name in ("loglikelihood", "generate_until"):
            setattr(lm, name, partial(self._timed, getattr(lm, name)))

    def _timed(self, call: Any, requests: Any, **named: Any) -> Any:
        began = time.process_time()
        try:
            return call(requests, **named)
        finally:
            self.seconds += time.process_time() - began


@contextmanager
def _forwards(model: Any) -> Iterator[list[None]]:
    """Yield a list that grows by one item for every forward pass of the model."""
    counted: list[None] = []
    handle = model.base_model.register_forward_hook(lambda *_: counted.append(None))
    try:
        yield counted
    finally:
        handle.remove()


def _loaded(settings: Settings) -> LoadedModel:
    torch.set_num_threads(settings.threads)
    loaded = load_model(settings.model)
    loaded.model.float().eval().requires_grad_(False)
    return loaded


def tiny() -> dict[str, Any]:
    """Run the suite ``tiny`` on gym-nano, as ``gym eval`` does."""
    from gym_fed.evaluation.evaluator import Evaluator

    began = time.perf_counter()
    results = Evaluator(["tiny"], "gym-nano").run()
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "rows": sum(len(task.samples) for task in results.tasks.values())}


def main() -> None:
    """Run the side that the command line selects."""
    side = sys.argv[1]
    if side == "tiny":
        torch.set_num_threads(1)
        found = tiny()
    else:
        settings = Settings(**json.loads(sys.argv[2]))
        if side == "batch":
            found = dict(best_batch_sizes(settings))
        else:
            found = {"ours": ours, "theirs": theirs}[side](settings, list(settings.tasks))
    if side != "batch":
        found["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    print(json.dumps(found))


if __name__ == "__main__":
    main()
