"""Search for the best settings with Optuna. Each trial is a run in a separate folder; it may be pruned and resumed.

Akiba et al. 2019, "Optuna". Optuna's journal in the folder of the search stores the study. Several workers may share
it, also over a network file system. An interrupted trial runs again with the same settings in the same folder, where it
resumes from its last checkpoint.
"""

from __future__ import annotations

import json
import math
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.config.schema.base import with_schema_defaults
from gym_fed.config.train.training import SearchConfig, SearchRange, TrainingConfig
from gym_fed.config.yaml.file import dump_yaml, validate
from gym_fed.core.errors import ErrorCode, GymError, refuse_first
from gym_fed.core.files import write_atomically
from gym_fed.core.plain_yaml import parse_value
from gym_fed.core.text import plain
from gym_fed.training.run.checks import check_config
from gym_fed.training.run.folder import FolderLock, is_held
from gym_fed.training.run.hooks import ShouldStop, StepReport
from gym_fed.training.run.spikes import Diverged

if TYPE_CHECKING:
    import optuna


_FOLDER = "folder"  # user attribute with the folder of the trial
_REASON = "ended"  # user attribute with the reason why the trial has no value
_WORKERS = "workers"  # contains a folder per trial, which the trial's worker locks
_LOCK_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class TrialResult:
    """The outcome of a trial: settings, state (``complete``, ``pruned`` or ``fail``), and metric if it has one."""

    number: int
    parameters: dict[str, Any]
    state: str
    value: float | None
    folder: str
    why: str = ""


class _Stopped(BaseException):
    """Raised on Ctrl-C. Not an ``Exception``, so that Optuna still considers the trial running, and it is run again."""


OnTrial = Callable[[TrialResult], None]


class Search:
    """A search in the folder ``config.output_dir``, which any number of processes may share.

    Args:
        config: The config of the search.
        on_trial: Called with every finished trial.
        on_report: Called with every step's report and the number of its trial.
        should_stop: Called after every step; if it returns True, the trial saves a checkpoint and ``INTERRUPTED`` is
            raised.
    """

    def __init__(
        self,
        config: SearchConfig,
        *,
        on_trial: OnTrial | None = None,
        on_report: Callable[[int, StepReport], None] | None = None,
        should_stop: ShouldStop | None = None,
    ) -> None:
        self.config = config
        self.folder = config.output_dir
        self._on_trial = on_trial
        self._on_report = on_report
        self._should_stop = should_stop
        reason = "privacy: every trial spends privacy, which a search does not account for"
        remedy = "search on public rows, and train on the private ones with the best settings"
        refuse_first((config.privacy is not None, reason, remedy))
        for values in _settings_to_check(config.search.parameters):
            check_config(self._trial_config(values, self.folder / "trials"))

    def run(self, num_trials: int | None = None) -> list[TrialResult]:
        """Run trials until ``num_trials`` have ended; by default, the number in the config.

        Returns:
            The ended trials, by number. The config of the best one is written to ``best.yaml``.

        Raises:
            GymError: ``INTERRUPTED`` after ``should_stop``; ``FILE_EXISTS`` if the folder belongs to a different
                search.
        """
        import optuna

        # Optuna marks its sampler for several workers (constant_liar) as experimental.
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._claim_folder()
        num_trials = num_trials or self.config.search.num_trials
        study = self._study()
        while (next_trial := self._next_trial(study, num_trials)) is not None:
            trial, lock = next_trial
            try:
                self._run_trial(study, trial)
            except _Stopped as stop:
                remedy = "run the same command again to resume"
                raise GymError(ErrorCode.INTERRUPTED, str(stop), remedy) from stop
            finally:
                lock.release()
            with self._locked():
                self._write_best(study)
        return [_result(trial) for trial in _ended(study)]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other workers from choosing a trial or writing results within a context."""
        while True:
            try:
                lock = FolderLock(self.folder)
                break
            except GymError as error:
                if error.code is not ErrorCode.STATE_LOCKED:
                    raise
            time.sleep(_LOCK_POLL_SECONDS)
        try:
            yield
        finally:
            lock.release()

    def _next_trial(self, study: optuna.Study, num_trials: int) -> tuple[optuna.Trial, FolderLock] | None:
        """Choose the next trial and lock its folder; None if ``num_trials`` trials have ended or are running."""
        with self._locked():
            num_running = self._retry_interrupted(study)
            if len(_ended(study)) + num_running >= num_trials:
                return None
            # A new seed per trial, since otherwise workers and resumed searches would draw the same settings.
            study.sampler = self._sampler(self.config.search.seed + len(study.get_trials(deepcopy=False)))
            trial = study.ask()
            name = _folder_of(trial) or f"trial-{trial.number:04d}"
            trial.set_user_attr(_FOLDER, name)
            folder = self.folder / _WORKERS / name
            folder.mkdir(parents=True, exist_ok=True)
            return trial, FolderLock(folder)

    def _run_trial(self, study: optuna.Study, trial: optuna.Trial) -> None:
        """Train a trial and record its metric."""
        import optuna

        try:
            study.tell(trial, self._objective(trial))
        except optuna.TrialPruned:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        except GymError:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            raise
        if self._on_trial is not None:
            self._on_trial(_result(study.trials[trial.number]))

    def _study(self) -> optuna.Study:
        import optuna
        from optuna.storages.journal import JournalFileBackend

        file = self.folder / "study.journal"
        return optuna.create_study(
            study_name="search",
            storage=optuna.storages.JournalStorage(JournalFileBackend(str(file))),
            pruner=self._pruner(),
            direction=self.config.search.direction,
            load_if_exists=True,
        )

    def _sampler(self, seed: int) -> optuna.samplers.BaseSampler:
        import optuna

        if self.config.search.sampler == "tpe":
            # With constant_liar, running trials are treated as bad ones, so that no settings are tried twice.
            return optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        return optuna.samplers.RandomSampler(seed=seed)

    def _pruner(self) -> optuna.pruners.BasePruner:
        import optuna

        pruner = self.config.search.pruner
        if pruner.name == "median":
            return optuna.pruners.MedianPruner(pruner.n_startup_trials, pruner.n_warmup_steps)
        if pruner.name == "hyperband":
            return optuna.pruners.HyperbandPruner(min_resource=pruner.min_resource)
        return optuna.pruners.NopPruner()

    def _retry_interrupted(self, study: optuna.Study) -> int:
        """Queue interrupted trials to run first, in their old folders; return the number of running trials."""
        from optuna.trial import TrialState

        num_running = 0
        for trial in study.get_trials(states=(TrialState.RUNNING,)):
            name = _folder_of(trial)
            if name is not None and is_held(self.folder / _WORKERS / name):
                num_running += 1
                continue
            study.tell(trial.number, state=TrialState.FAIL)
            study.enqueue_trial(trial.params, user_attrs={_FOLDER: name})
        return num_running

    def _objective(self, trial: optuna.Trial) -> float:
        import optuna

        values = {key: _suggest(trial, key, r) for key, r in self.config.search.parameters.items()}
        name = str(_folder_of(trial))

        def on_report(report: StepReport) -> None:
            if self._on_report is not None:
                self._on_report(trial.number, report)
            value = self._reported_metric(report)
            if value is None:
                return
            trial.report(value, report.step)
            if trial.should_prune():
                trial.set_user_attr(_REASON, f"pruned at step {report.step} of {report.total}")
                raise optuna.TrialPruned

        try:
            result = self._train(self._trial_config(values, self.folder / "trials" / name), on_report)
        except GymError as error:
            if error.code is ErrorCode.INTERRUPTED:
                raise _Stopped(f"stopped in trial {trial.number}") from error
            if not isinstance(error, Diverged):
                raise
            trial.set_user_attr(_REASON, error.message)
            raise optuna.TrialPruned from error
        value = self._final_metric(result)
        if not math.isfinite(value):
            trial.set_user_attr(_REASON, f"{self.config.search.metric} is {value}")
            raise optuna.TrialPruned
        return value

    def _train(self, config: TrainingConfig, on_report: Callable[[StepReport], None]) -> Any:
        """Return the metrics of a trial's run; a run that is already finished is only read."""
        from gym_fed.tracking.trackers.base import read_lines
        from gym_fed.training.trainer import Trainer

        if not (config.output_dir / "result.json").exists():
            Trainer(config, on_report=on_report, should_stop=self._should_stop).train()
        return read_lines(config.output_dir / "metrics.jsonl")

    def _reported_metric(self, report: StepReport) -> float | None:
        metric = self.config.search.metric
        if report.evaluation is not None:
            return report.evaluation.get(metric)
        return report.loss if metric == "loss" else report.reward if metric == "reward" else None

    def _final_metric(self, lines: list[dict[str, Any]]) -> float:
        metric = self.config.search.metric
        values = [float(line[metric]) for line in lines if metric in line]
        if not values:
            known = ", ".join(sorted({key for line in lines for key in line} - {"step"}))
            reason = f"search.metric: the run does not log {metric!r}"
            raise GymError(ErrorCode.CONFIG_INVALID, reason, f"one of {known}")
        return values[-1]

    def _trial_config(self, values: dict[str, Any], folder: Path) -> TrainingConfig:
        """Return the config of a trial.

        Raises:
            GymError: ``CONFIG_INVALID`` with a key that is unknown or has an invalid value.
        """
        given = json.loads(json.dumps(self.config.trial(output_dir=str(folder))))
        for key, value in values.items():
            parent = given
            *sections, name = key.split(".")
            for section in sections:
                if not isinstance(parent.get(section), dict):
                    parent[section] = {}
                parent = parent[section]
            parent[name] = value
        return validate(given, TrainingConfig, f"search ({', '.join(f'{k}={v}' for k, v in values.items())})")

    def _claim_folder(self) -> None:
        """Refuse a folder with a different search; only the number of trials and the paths may differ."""
        text = dump_yaml(self.config)
        file = self.folder / "search.yaml"
        if file.exists():
            remedy = "choose another output_dir, or delete the folder"
            try:
                stored = parse_value(file.read_text(encoding="utf-8"))
            except ValueError as error:
                raise GymError(ErrorCode.STATE_CORRUPT, f"{file} cannot be read: {error}", remedy) from error
            old, new = (with_schema_defaults(values, self.config) for values in (stored, parse_value(text)))
            if _comparable(old) != _comparable(new):
                raise GymError(ErrorCode.FILE_EXISTS, f"{self.folder} contains another search", remedy)
        elif self.folder.exists() and any(self.folder.iterdir()):
            reason = f"{self.folder} is not empty and contains no search"
            raise GymError(ErrorCode.FILE_EXISTS, reason, "choose an empty or new output_dir")
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text.encode())

    def _write_best(self, study: optuna.Study) -> None:
        """Write ``best.yaml``, a config for `gym train`, and ``trials.json``."""
        results = [_result(trial) for trial in _ended(study)]
        table = [vars(result) for result in results]
        write_atomically(self.folder / "trials.json", f"{json.dumps(table, indent=2)}\n".encode())
        best = self.best(results)
        if best is not None:
            config = self._trial_config(best.parameters, self.folder / "best")
            head = f"# trial {best.number}: {self.config.search.metric} {best.value}\n"
            write_atomically(self.folder / "best.yaml", (head + dump_yaml(config)).encode())

    def best(self, results: list[TrialResult]) -> TrialResult | None:
        """Return the complete trial with the best metric; None if there is none."""
        complete = [r for r in results if r.value is not None and r.state == "complete"]
        sign = 1 if self.config.search.direction == "minimize" else -1
        return min(complete, key=lambda r: (sign * (r.value or 0.0), r.number), default=None)


def _folder_of(trial: Any) -> str | None:
    """Return the name of a trial's folder; None if it has none yet.

    Raises:
        GymError: ``STATE_CORRUPT`` for any other name, since a search from somebody else may name a path.
    """
    name: str | None = trial.user_attrs.get(_FOLDER)
    if name is not None and not re.fullmatch(r"trial-[0-9]{4,9}", str(name)):
        raise GymError(
            ErrorCode.STATE_CORRUPT,
            f"trial {trial.number} of the search has the folder {plain(name, 80)!r}",
            "delete the search's folder, or choose another output_dir",
        )
    return name


def _suggest(trial: optuna.Trial, key: str, values: SearchRange) -> Any:
    """Draw a value with the study's sampler. Choices are passed as JSON, so that they may also be lists."""
    if values.choices is not None:
        return json.loads(trial.suggest_categorical(key, [json.dumps(choice) for choice in values.choices]))
    assert values.low is not None
    assert values.high is not None
    if values.integer:
        step = int(values.step or 1)
        return trial.suggest_int(key, int(values.low), int(values.high), log=values.log, step=step)
    return trial.suggest_float(key, values.low, values.high, log=values.log, step=values.step)


def _ended(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    from optuna.trial import TrialState

    return study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED))


def _result(trial: optuna.trial.FrozenTrial) -> TrialResult:
    from optuna.distributions import CategoricalDistribution

    parameters = {
        key: json.loads(value) if isinstance(trial.distributions[key], CategoricalDistribution) else value
        for key, value in trial.params.items()
    }
    state = trial.state.name.lower()
    why = str(trial.user_attrs.get(_REASON, ""))
    folder = str(trial.user_attrs.get(_FOLDER, ""))
    return TrialResult(trial.number, parameters, state, trial.value, folder, why)


def _settings_to_check(ranges: dict[str, SearchRange]) -> Iterator[dict[str, Any]]:
    """Yield settings that cover every choice and both ends of every range, with the first value of all other keys."""
    values = {
        key: values.choices or [int(end or 0) if values.integer else end for end in (values.low, values.high)]
        for key, values in ranges.items()
    }
    first = {key: options[0] for key, options in values.items()}
    yield first
    for key, options in values.items():
        yield from ({**first, key: option} for option in options[1:])


def _comparable(values: Mapping[str, Any]) -> dict[str, Any]:
    ignored = ("output_dir", "logging_steps", "tracking", "search")
    search = {key: value for key, value in values["search"].items() if key != "num_trials"}
    return {**{key: value for key, value in values.items() if key not in ignored}, "search": search}
