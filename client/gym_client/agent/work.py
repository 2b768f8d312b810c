"""One round on the contributor's machine: global version, training, encoding and signature. No network access."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from gym_client.agent.data import Data, load_data
from gym_client.agent.global_model import GlobalModel, base_source, global_model
from gym_client.agent.hooks import Hooks, TimeLimit, current_hooks
from gym_client.agent.policy import Policy
from gym_client.agent.region import RegionalHub, RegionalUpdate
from gym_client.agent.residuals import Residuals
from gym_client.agent.tasks import FinishedUpdate, TaskFolder, Trained
from gym_client.agent.version_sum import VersionSum
from gym_client.audits.evidence import begin_record
from gym_client.base.store import BaseStore
from gym_client.identity.home import Home
from gym_client.identity.pins import key_at
from gym_client.privacy.book import PrivacyBook
from gym_client.privacy.private_task import PrivateTask
from gym_client.privacy.secure_round import SecureRound
from gym_fed.config.hub.task import TaskSpec, check_lineage
from gym_fed.config.schema.plugins import plugins_of, require_plugins
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.failpoints import failpoint
from gym_fed.core.text import counted, plain

if TYPE_CHECKING:
    from gym_fed.data.row_counts import RowCounts
    from gym_fed.delta.encode import Refine
    from gym_fed.training.audits.observer import StepObserver
    from gym_fed.training.rows.run_rows import LastEncoded
    from gym_fed.training.run.result import TrainResult


_LOGGED_STEPS = 10

_MAX_ERROR_CHARS = 2000
"""Maximum characters in the description of an invalid task, since a hub chooses the number and length of its keys."""


@dataclass(frozen=True)
class Setup:
    """The contributor's choices: data, model and device."""

    data: str | None = None
    """Path of a data file; None for the built-in example."""
    data_format: str = "auto"
    columns: str | None = None
    """The mapping of the file's columns; see ``gym_fed.data.reading``."""
    model: str | None = None
    """The local path of the base; None for the name in the task."""
    device: str = "auto"
    region: str | None = None
    """Folder of a regional hub, whose rounds replace data and training; None for an ordinary contributor."""


def parse_task(text: str) -> TaskSpec:
    """Parse a task strictly and verify the chain of versions in it.

    Raises:
        GymError: ``MISSING_DEPENDENCY`` if a plug-in of the task is missing or different on this machine;
            ``POLICY_REFUSED`` with all unknown keys and invalid values; ``BASE_MISMATCH`` with the first version that
            does not follow from its predecessor.
    """
    try:
        spec = TaskSpec.model_validate_json(text)
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            where = ".".join(str(part) for part in problem["loc"]) or "task"
            unknown = problem["type"] == "extra_forbidden"
            lines.append(f"{where}: {'unknown key' if unknown else problem['msg']}")
        raise GymError(
            ErrorCode.POLICY_REFUSED,
            plain(f"the task is invalid: {'; '.join(lines)}", _MAX_ERROR_CHARS),
            "a task may only contain training settings; report it to the coordinator",
        ) from error
    require_plugins(spec.plugins, "the task", plugins_of(spec.recipe, spec.codec))
    check_lineage(spec)
    return spec


_threads_before: int | None = None


def use_threads(number: int | None) -> None:
    """Set the number of torch threads; None restores the number from before the first call."""
    global _threads_before
    if number is None and _threads_before is None:
        return
    import torch

    if _threads_before is None:
        _threads_before = torch.get_num_threads()
    torch.set_num_threads(_threads_before if number is None else number)
    if number is None:
        _threads_before = None


def perform(
    spec: TaskSpec,
    message_id: str,
    home: Home,
    policy: Policy,
    setup: Setup,
    soup_path: Callable[[str], Path],
) -> FinishedUpdate:
    """Perform a task, resuming earlier work.

    Args:
        spec: The task.
        message_id: Id of the message, which is also the name of the task's folder.
        home: The home with key, task folders and residuals.
        policy: Limits of this machine.
        setup: Data, model and device.
        soup_path: Returns the file of an already fetched soup by its sha256.

    Returns:
        The signed update. Repeated calls return the same update with the same nonce.

    Raises:
        GymError: ``POLICY_REFUSED``; ``BASE_MISMATCH``; ``INTERRUPTED``, after writing a checkpoint; errors from the
            data, the model or the training.
    """
    policy.check(spec)
    time_limit = TimeLimit(policy, current_hooks())
    use_threads(policy.threads)
    region = RegionalHub(Path(setup.region)) if setup.region else None
    if region is None:
        data = load_data(setup.data, setup.data_format, setup.columns, policy.contaminated_rows)
    else:
        data = region.data()
    folder = TaskFolder(home.task_folder(message_id))
    fetched = BaseStore(home).find(spec.base_digest)
    source = base_source(setup.model or fetched, spec.base_model)
    named = {"columns": setup.columns} if setup.columns else {}
    folder.begin(spec, {"data": data.digest, "device": setup.device, "model": source, **named})
    done = folder.renewed(spec, key_at(home, spec.server), current_hooks().now())
    if done is not None:
        return done
    model = global_model(source)
    try:
        with time_limit.bounding_templates():
            return _trained_update(
                spec, home, policy, setup, model, data, folder, soup_path, time_limit, region
            )
    finally:
        model.release()


def _trained_update(
    spec: TaskSpec,
    home: Home,
    policy: Policy,
    setup: Setup,
    model: GlobalModel,
    data: Data,
    folder: TaskFolder,
    soup_path: Callable[[str], Path],
    time_limit: TimeLimit,
    region: RegionalHub | None,
) -> FinishedUpdate:
    """Train (or let a region train), encode and sign an update."""
    private = PrivateTask(spec, data, folder, PrivacyBook(home)) if spec.recipe.privacy is not None else None
    if private is not None:
        private.require_within_budget(policy)

    def path_in_time(sha256: str) -> Path:
        time_limit.require("the update to the global version")
        return soup_path(sha256)

    model.advance(spec, path_in_time, VersionSum(home.versions(spec.server)))
    record, residuals = None, Residuals(home, spec.server)
    if spec.audit is not None:
        record = begin_record(home, spec, folder, data, policy.max_audit_bytes, current_hooks().now())
    observer: StepObserver | None = record
    if spec.recipe.keep_optimizer_state and region is None:
        from gym_fed.training.run.kept_moments import KeptMoments

        policy.check_optimizer_state(model.moments_bytes())
        kept = partial(residuals.moments, spec.base_digest, _rounds_of(spec))
        observer = KeptMoments(kept, folder.moments_path, spec.base_digest)
    result: TrainResult | RegionalUpdate
    if region is None:
        result = _train(spec, model, data, folder, time_limit, setup, observer)
    else:
        result = region.update(spec, home, model.source, time_limit)
    failpoint("client-trained")
    current_hooks().progress("encode", 0, 1, None)
    trained = _encode(spec, model, result, data, folder, residuals, time_limit)
    if private is not None and not isinstance(result, RegionalUpdate):
        trained = private.charged(trained, result)
    if spec.recipe.sends_factors:
        result.model.unload()
    model.restore()
    if spec.secure_aggregation is not None:
        secure = SecureRound(home, spec, key_at(home, spec.server))
        trained = secure.mask(folder, trained, model.version_spec(spec), "data, model or device")
    limit = min(policy.max_update_bytes, spec.max_update_bytes)
    if trained.size_bytes > limit:
        raise GymError(
            ErrorCode.TOO_LARGE,
            f"the update has {counted(trained.size_bytes, 'byte')}, over the limit of {limit}",
            "raise max_update_bytes in policy.yaml" if limit == policy.max_update_bytes else "",
        )
    current_hooks().progress("encode", 1, 1, None)
    failpoint("client-encoded")
    root = None if record is None else record.root()
    trained = replace(trained, publish_name=policy.publish_name, training_root=root)
    return folder.finish(spec, trained, key_at(home, spec.server), current_hooks().now())


@cache
def _last_encoded() -> LastEncoded:
    """Return the cache of encoded rows, which all rounds of this process share."""
    from gym_fed.training.rows.run_rows import LastEncoded

    return LastEncoded()


def _train(
    spec: TaskSpec,
    model: GlobalModel,
    data: Data,
    folder: TaskFolder,
    time_limit: TimeLimit,
    setup: Setup,
    observer: StepObserver | None,
) -> TrainResult:
    from gym_fed.config.hub.round_training import round_training
    from gym_fed.delta.factors import require_matrix_targets
    from gym_fed.training.trainer import Trainer

    if spec.recipe.sends_factors:
        require_matrix_targets(spec.recipe, model.version_spec(spec).shapes)
    hooks = current_hooks()
    trainer = Trainer(
        round_training(spec.recipe, spec.server_round, folder.prepare_run(), setup.device),
        model=model.model,
        tokenizer=model.tokenizer,
        on_step=lambda step, total, loss: hooks.progress("train", step, total, loss),
        should_stop=lambda: hooks.should_stop() or time_limit.is_over(),
        last_encoded=_last_encoded(),
        on_rows=lambda name, counts: _report_rows(name, counts, spec.recipe.max_length),
        observer=observer,
    )
    try:
        with time_limit.bounding_steps():
            return trainer.train(dataset=data.rows, resume=True)
    except GymError as error:
        raise _with_cause(error, hooks, time_limit) from error


def _report_rows(name: str, counts: RowCounts, max_length: int) -> None:
    """Print how the rows are used, once for all rounds that use the same rows."""
    from gym_fed.data.string_rows import forms_in_words

    for sentence in (*forms_in_words(counts.forms), counts.warning(max_length)):
        if sentence is not None:
            _print_once(f"{name}: {sentence}")


@cache
def _print_once(line: str) -> None:
    from gym_fed.core.console import err

    err.print(line, markup=False)


def _with_cause(error: GymError, hooks: Hooks, time_limit: TimeLimit) -> GymError:
    """Return the trainer's interruption with its cause for the contributor; other errors are returned unchanged."""
    if error.code is not ErrorCode.INTERRUPTED:
        return error
    if not hooks.should_stop() and time_limit.is_over():
        return time_limit.error("training")
    return GymError(ErrorCode.INTERRUPTED, "stopped at a checkpoint", "run the same command again to resume")


def _rounds_of(spec: TaskSpec) -> list[int]:
    """Return the rounds that created the versions up to the task's."""
    return [soup.server_round for soup in spec.soups]


def _encode(
    spec: TaskSpec,
    model: GlobalModel,
    result: TrainResult | RegionalUpdate,
    data: Data,
    folder: TaskFolder,
    residuals: Residuals,
    time_limit: TimeLimit,
) -> Trained:
    """Encode the delta against the global version and stage the encoding error."""
    from gym_fed.delta.encode import encode_delta, lora_delta
    from gym_fed.training.tuning.lora import lora_factors

    version, codec, lora = model.version_spec(spec), spec.codec, spec.recipe.sends_factors
    loses = codec.error_feedback and (codec.quantises_factors or not lora)
    feedback = residuals.load(spec.base_digest, _rounds_of(spec)) if loses else None

    def on_tensor(_: str) -> None:
        time_limit.require("encoding")

    if lora:
        factors = lora_factors(result.model)
        report = lora_delta(
            factors,
            folder.delta_path,
            version,
            policy=codec,
            residual=feedback,
            on_tensor=on_tensor,
        )
    else:
        refine = _distiller(spec, model, result, data, time_limit) if codec.distill_steps else None
        report = encode_delta(
            result.model,
            model.tensors,
            codec,
            folder.delta_path,
            version,
            residual=feedback,
            refine=refine,
            on_tensor=on_tensor,
        )
    if feedback is not None:
        feedback.stage(folder.residual_path)
    return Trained(report.sha256, report.size_bytes, result.num_examples, _metrics(result, report.norm))


def _distiller(
    spec: TaskSpec,
    model: GlobalModel,
    result: TrainResult | RegionalUpdate,
    data: Data,
    time_limit: TimeLimit,
) -> Refine:
    """Return a distiller on this machine's data that reports progress and respects the time limit."""
    from gym_fed.data.rows import as_kind
    from gym_fed.delta.base import model_tensors
    from gym_fed.quantization.refining import distiller

    hooks = current_hooks()

    def on_step(step: int, total: int, loss: float) -> None:
        hooks.progress("distill", step, total, loss)
        time_limit.require("distilling the scales")

    return distiller(
        spec.codec,
        model.model,
        model.tensors,
        {name: tensor.clone() for name, tensor in model_tensors(result.model).items()},
        as_kind(data.rows, "supervised"),
        model.tokenizer,
        max_length=spec.recipe.max_length,
        seed=spec.recipe.seed + spec.server_round,
        on_step=on_step,
    )


def _metrics(result: TrainResult | RegionalUpdate, norm: float) -> dict[str, float]:
    if isinstance(result, RegionalUpdate):
        return {**result.metrics, "update_norm": float(norm)}
    first = result.losses[:_LOGGED_STEPS]
    routing = [float(entry["aux_loss"]) for entry in result.history if "aux_loss" in entry]
    return {
        "train_loss": float(result.final_loss),
        "first_loss": sum(first) / len(first),
        "num_steps": float(result.steps),
        "num_tokens": float(result.num_tokens),
        "update_norm": float(norm),
        **({"aux_loss": routing[-1]} if routing else {}),
    }
