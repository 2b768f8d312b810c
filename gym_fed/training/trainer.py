"""Train a model from a config, and write its run folder.

The algorithms are in ``algorithms/``; the training loop is TRL's. A resumed run ends with the same weights as an
uninterrupted one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.base.modeling.rope import rope_undone_on_error
from gym_fed.base.models import pick_device, quiet_loading
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.aliases import ExpectedElsewhere, with_other_arguments
from gym_fed.core.bounded.chat_operations import present_time_set
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import ALGORITHMS, OPTIMIZERS, TUNING
from gym_fed.data.pipeline import DataPipeline
from gym_fed.data.row_counts import RowCounts
from gym_fed.tracking.experiment import Experiment
from gym_fed.training.algorithms.base import Algorithm
from gym_fed.training.defaults import Defaults
from gym_fed.training.features.base import apply_features, features_during_run
from gym_fed.training.model.adapters import continued_adapter, require_none_merged, resolve_adapters
from gym_fed.training.model.loading import load_for_training, require_dtype
from gym_fed.training.model.peft_models import require_head_without_adapter, resume_adapter
from gym_fed.training.model.template_tokens import check_template_tokens, fit_to_template, require_embedded
from gym_fed.training.processes import group as processes
from gym_fed.training.processes.pipeline import cut_into_stages
from gym_fed.training.processes.sequence_parallel import place
from gym_fed.training.processes.sharding import deepspeed_loading, resumable, settings_of
from gym_fed.training.rows.batch_size import choose_batch_size, known_sizes
from gym_fed.training.rows.run_rows import LastEncoded, encode_run, has_held_out, rows_of_run
from gym_fed.training.rows.tokenized import RunRows
from gym_fed.training.run.check import begin_check, evaluates_first
from gym_fed.training.run.checks import check_config, check_graders, require_training
from gym_fed.training.run.early_stopping import EarlyStop, check_early_stopping
from gym_fed.training.run.folder import RunFolder
from gym_fed.training.run.hooks import KeptRandomState, OnReport, OnRows, OnStep, RunHooks, ShouldStop
from gym_fed.training.run.job import Job
from gym_fed.training.run.loop import finish_model, make_result, run_to_end, save_result, with_check
from gym_fed.training.run.reproducibility import RunWarning, deterministic, record_environment
from gym_fed.training.run.result import TrainResult
from gym_fed.training.run.spikes import Rollbacks, SpikeWatch
from gym_fed.training.trl_glue import restore_after_run
from gym_fed.training.vision.conversations import is_processor, require_image_model
from gym_fed.training.vision.parts import freeze_parts, frozen_parts

if TYPE_CHECKING:
    from gym_fed.config.delta import CodecPolicy
    from gym_fed.config.hub.soup import DeltaSoupConfig
    from gym_fed.evaluation.graders.base import Grader
    from gym_fed.soup.delta_soup import SoupResult
    from gym_fed.training.audits.observer import StepObserver
    from gym_fed.training.run.afterwards import Contributions
    from gym_fed.training.tuning.base import Tuning


class Trainer(ExpectedElsewhere):
    """Trains one model with one config.

    Args:
        config: The run's config.
        model: Model to train in place instead of loading ``config.model``. With ``finetuning: lora``, its weights do
            not change; the result's model is then a PEFT wrapper, whose ``unload()`` returns the original.
        tokenizer: The tokenizer of ``model``.
        graders: Graders in addition to ``config.graders``.
        on_step: Called after every optimiser step with ``(step, total, loss)``.
        on_rows: Called before training with ``("data", counts)``, and with ``("eval_data", counts)`` if there are such
            rows. Without it, a warning is issued if many rows are lost.
        on_report: Called with a ``hooks.StepReport`` after every step and evaluation; may raise to end the run.
        should_stop: Called after every step; if it returns True, a checkpoint is saved and ``INTERRUPTED`` is raised.
        check: True to measure the model before and after training: held-out loss, answers to some prompts, and general
            knowledge (``result.check``). Rows are held out if none are specified.
        last_encoded: A cache of encoded rows for successive runs on the same rows.
        observer: Observes every step, to record or replay it for an audit, or to save the optimiser's moments.
    """

    def __init__(
        self,
        config: TrainingConfig,
        *,
        model: Any = None,
        tokenizer: Any = None,
        graders: Sequence[Grader] = (),
        on_step: OnStep | None = None,
        on_rows: OnRows | None = None,
        on_report: OnReport | None = None,
        should_stop: ShouldStop | None = None,
        check: bool = False,
        last_encoded: LastEncoded | None = None,
        observer: StepObserver | None = None,
    ) -> None:
        from gym_fed.evaluation.graders.base import build_graders

        if (model is None) != (tokenizer is None):
            raise GymError(ErrorCode.USAGE, "a model in memory needs its tokenizer, and vice versa")
        if model is None and config.model is None and config.model_init is None:
            raise GymError(ErrorCode.CONFIG_INVALID, "model: not set", "set model or model_init")
        self._defaults = Defaults(config, model, check=check)
        config = self.config = resolve_adapters(self._defaults.for_method(config))
        self._check = check
        self._given = None if model is None else (model, tokenizer)
        check_config(config)
        self._graders = [*graders, *build_graders(config.graders)]
        check_graders(config, self._graders)
        self._on_step = on_step
        self._on_rows = on_rows
        self._on_report = on_report
        self._hooks: RunHooks | None = None
        self._folder: RunFolder | None = None
        self.result: TrainResult | None = None
        self._should_stop = should_stop
        self._observer = observer
        self._encode = encode_run if last_encoded is None else last_encoded.encode_run

    def train(
        self,
        dataset: Sequence[dict[str, Any]] | str | None = None,
        eval_dataset: Sequence[dict[str, Any]] | str | None = None,
        resume: bool = True,
    ) -> TrainResult:
        """Train to the end, from the last checkpoint if there is one.

        Args:
            dataset: Rows (see ``gym_fed.data.rows``), or a name as for ``named_source``, in place of ``config.data``.
            eval_dataset: Rows, or a name, in place of ``config.eval_data``.
            resume: False to refuse an unfinished run in ``output_dir`` instead of resuming it.

        Raises:
            GymError: ``INTERRUPTED`` after ``should_stop``; ``FILE_EXISTS``, ``DATA_INVALID``, ``MODEL_NOT_FOUND`` and
                ``CONFIG_INVALID`` before anything is written. An optimiser may refuse the model only just before the
                first step; the folder then still accepts a different config.
        """
        require_training(self.config)
        try:
            given = None if self._given is None else self._given[0]
            with processes.refuse_lost_process(), rope_undone_on_error(given):
                allowed = resume and self.config.resume_from_checkpoint is not False
                self.result = self._run(dataset, eval_dataset, allowed)
            return self.result
        finally:
            if self._hooks is not None:
                self._hooks.close()
            if self._folder is not None:
                self._folder.close()

    @with_other_arguments
    def apply_deltasoup(self, others: Contributions, settings: DeltaSoupConfig | None = None) -> SoupResult:
        """Merge the trained weights with other users' deltas of the same base; the result is then base plus soup.

        Args:
            others: Contributions by user, or a list of them: ``.gymdelta`` files, model folders, or models in memory.
            settings: Merge rule and codecs; by default ``DeltaSoupConfig()``, whose rule tolerates malicious clients.

        Returns:
            The soup and the outcome of every contribution; the trainer's own contribution is named ``self``.

        Raises:
            GymError: ``USAGE`` before training, or if ``config.model`` does not specify the base; see ``DeltaSoup`` for
                other errors. After an error, the result's model is unchanged.
        """
        from gym_fed.training.run.afterwards import soup_with

        result = self._require_result()
        model, soup = soup_with(result.model, self.config, others, settings)
        self.result = replace(result, model=model)
        return soup

    def export(
        self, path: str | Path, format: str | None = None, codec: CodecPolicy | None = None, *,
        quantization: str = "", check: bool = True,
    ) -> Path:  # fmt: skip
        """Write the result's model to a new file or folder, like `gym export`.

        Args:
            path: The new file or folder; nothing is overwritten.
            format: A name from ``gym export --list``; by default determined by the suffix of ``path``, otherwise
                ``huggingface``.
            codec: Codec for the format ``delta``; by default one bit per weight, or LoRA factors after LoRA training.
            quantization: A quantisation of the format; by default its first one.
            check: True to load the export in a new process and compare it; if it differs, it is deleted and
                ``EXPORT_DIFFERS`` is raised.
        """
        from gym_fed.training.run.afterwards import export

        result = self._require_result()
        arguments = (result.model, result.tokenizer, self.config)
        return export(*arguments, Path(path), format, codec, quantization, check=check)

    def _require_result(self) -> TrainResult:
        if self.result is None:
            raise GymError(ErrorCode.USAGE, "nothing has been trained yet", "call train() first")
        return self.result

    def _run(
        self,
        dataset: Sequence[dict[str, Any]] | str | None,
        eval_dataset: Sequence[dict[str, Any]] | str | None,
        resume: bool,
    ) -> TrainResult:
        """Run all stages of a training run."""
        config = self.config = known_sizes(self.config) or self.config
        algorithm = ALGORITHMS.new(config.algorithm)
        tuning = TUNING.new(config.finetuning)
        device, folder, begun = self._start_processes(config)
        with present_time_set(begun):
            given = rows_of_run(config, dataset, eval_dataset, self._split_of)
            config = self.config = self._defaults.for_rows(self.config, self._given, given[0])
            check_early_stopping(config, has_eval_data=has_held_out(config, given[1]))
            if self._given is None:
                check_template_tokens(config, given[0])
            splitting = deepspeed_loading(config)  # in effect until it is deleted
            model, tokenizer = self._load_model(config)
            rows = self._encode(config, algorithm, tokenizer, *given)
            require_embedded(model, rows.encoded, rows.eval_encoded)
            processes.on_main(lambda: folder.check(config, *rows.digests, resume=resume))
            self._report_rows(dataset, rows)
            model = _prepare_model(config, algorithm, tuning, model, tokenizer, device)
            opened = processes.on_main(lambda: _open_folder(folder, config, rows, begun, resume))
            checkpoint = Path(opened) if opened else None
            config = self.config = choose_batch_size(config, algorithm, model, tokenizer, rows)
            hooks = self._hooks = self._make_hooks(config, folder)
            arguments = (config, algorithm, model, tokenizer, given, rows.eval_encoded, folder.path)
            check = None
            if self._check and processes.is_main():
                check = begin_check(*arguments, is_new=checkpoint is None, should_stop=self._should_stop)
            trainer, best_step = self._fit(
                config, algorithm, tuning, model, tokenizer, rows, folder, checkpoint, hooks
            )
            del splitting
            finish_model(model, trainer, hooks, folder)
            result = make_result(config, trainer, hooks, rows, model, tokenizer, folder, best_step)
            if config.save_final:
                return save_result(config, trainer, algorithm, hooks, folder, result, check)
            return with_check(result, check)

    def _start_processes(self, config: TrainingConfig) -> tuple[Any, RunFolder, str]:
        """Return the device, the run folder, and the time at which the run was first started."""
        import torch

        device = pick_device(config.device)
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        folder = self._folder = RunFolder(config.output_dir)
        processes.start(settings_of(config), device)
        processes.on_main(folder.require_unfinished)
        return device, folder, processes.on_main(lambda: folder.begun(config))

    def _split_of(self, num_rows: int) -> float:
        """Return the effective ``eval_split`` for this number of rows."""
        self.config = self._defaults.splitting(self.config, num_rows)
        return self.config.eval_split

    def _load_model(self, config: TrainingConfig) -> tuple[Any, Any]:
        """Load the model and tokenizer, with the config's features and chat template."""
        if self._given is not None:
            require_dtype(self._given[0], config)
            require_none_merged(config)
        model, tokenizer = self._given or load_for_training(config)
        require_image_model(config, reads_images=is_processor(tokenizer))
        tokenizer = fit_to_template(model, tokenizer, config)
        return apply_features(model, config), tokenizer

    def _report_rows(self, dataset: Sequence[dict[str, Any]] | str | None, rows: RunRows) -> None:
        """Report the counts of rows to ``on_rows`` before training."""
        if isinstance(dataset, DataPipeline) and dataset.counts.rows:
            self._report_counts("pipeline", dataset.counts)
        self._report_counts("data", rows.counts)
        if rows.eval_counts is not None:
            self._report_counts("eval_data", rows.eval_counts)

    def _report_counts(self, name: str, counts: RowCounts) -> None:
        if self._on_rows is not None and counts.rows:  # a stream has no counts yet
            self._on_rows(name, counts)
        elif (problem := counts.warning(self.config.max_length)) is not None:
            warnings.warn(f"{name}: {problem}", RunWarning, stacklevel=2)

    def _make_hooks(self, config: TrainingConfig, folder: RunFolder) -> RunHooks:
        spikes = config.loss_spikes
        return RunHooks(
            self._track,
            config.logging_interval,
            on_step=self._on_step,
            on_report=self._on_report,
            should_stop=processes.agreed(self._should_stop),
            watch=None if spikes is None else SpikeWatch(spikes, folder.path),
        )

    def _fit(
        self,
        config: TrainingConfig,
        algorithm: Algorithm,
        tuning: Tuning,
        model: Any,
        tokenizer: Any,
        rows: RunRows,
        folder: RunFolder,
        checkpoint: Path | None,
        hooks: RunHooks,
    ) -> tuple[Any, int | None]:
        """Build the algorithm's trainer and run it. Return the trainer, and the step whose weights were restored."""
        from transformers import PrinterCallback

        optimizer = OPTIMIZERS.new(config.optimizer)
        stopping, spikes = config.early_stopping, config.loss_spikes
        early_stop = None if stopping is None else EarlyStop(stopping, model, folder.path)
        callbacks = [hooks, KeptRandomState(), *([early_stop] if early_stop else [])]
        with (
            deterministic(config.reproducibility),
            tuning.finishing(model, config),
            quiet_loading(),
            restore_after_run(model),
            features_during_run(model, config),
            self._resources() as resources,
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore", FutureWarning)  # transformers warns about its next major release
            job = Job(
                config=config,
                model=model,
                tokenizer=tokenizer,
                encoded=rows.encoded,
                eval_encoded=rows.eval_encoded,
                checkpoints=folder.checkpoints,
                callbacks=[*callbacks, *tuning.callbacks(model, config), *optimizer.callbacks(config)],
                graders=self._graders,
                evaluate_first=self._check and checkpoint is None and evaluates_first(config),
                resources=resources,
            )
            trainer = algorithm.build(job)
            trainer.make_optimizer = lambda model: optimizer.make(model, config)
            trainer.remove_callback(PrinterCallback)
            if self._observer is not None:
                self._observer.attach(trainer)
            resumable(trainer)
            processes.require_all(trainer.accelerator.num_processes)
            rollbacks = None if spikes is None or not spikes.rollback else Rollbacks(spikes, folder.path)
            run_to_end(trainer, checkpoint, hooks, folder, rollbacks, early_stop)
            best_step = early_stop.restore(trainer.state) if early_stop and not hooks.stopped else None
        return trainer, best_step

    def _track(self, from_step: int) -> Experiment:
        """Open the tracked run, which continues after the given step."""
        config, tracker = self.config, self.config.tracker
        experiment = Experiment(
            config.output_dir,
            config.tracking,
            project=tracker.project,
            name=tracker.name,
            tags=tracker.tags,
            mode=tracker.mode,
            uri=tracker.uri,
            from_step=from_step,
            active=processes.is_main(),
        )
        experiment.log_config(config)
        return experiment

    @contextmanager
    def _resources(self) -> Iterator[ExitStack]:
        """Set up the graders for the duration of the run; yield the stack, to which further resources can be added."""
        with ExitStack() as stack:
            for grader in self._graders:
                stack.callback(grader.teardown)
                grader.setup()
            yield stack


def _prepare_model(
    config: TrainingConfig, algorithm: Algorithm, tuning: Tuning, model: Any, tokenizer: Any, device: Any
) -> Any:
    """Return the model on its device, with the algorithm's head, the tuning method applied, and some parts frozen."""
    from transformers import set_seed

    set_seed(config.seed)
    model = place(algorithm.adapt(model, tokenizer, config), config, device)
    frozen = frozen_parts(model, config)
    adapter = continued_adapter(config)
    model = tuning.prepare(model, config) if adapter is None else resume_adapter(model, adapter, config)
    if algorithm.multiplies_by_head:
        require_head_without_adapter(model, config)
    freeze_parts(model, config, frozen)
    return cut_into_stages(model, config, device)


def _open_folder(folder: RunFolder, config: TrainingConfig, rows: RunRows, begun: str, resume: bool) -> str:
    """Open the run folder. Return the checkpoint to resume from, or an empty string."""
    counts = rows.counts, rows.eval_counts
    checkpoint = folder.open(config, *rows.digests, begun=begun, resume=resume, counts=counts)
    record_environment(folder.path, config, rows.digests[0])
    return str(checkpoint or "")
