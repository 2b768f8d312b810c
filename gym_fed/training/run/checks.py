"""Checks of a run before anything is loaded: its config, the machine, and the files to which the config refers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from gym_fed.base.modeling.processors import is_vision_model, load_processor
from gym_fed.base.models import load_tokenizer, pick_device, resolve
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError, refuse_first
from gym_fed.core.registries import ALGORITHMS, OPTIMIZERS, TUNING
from gym_fed.core.requirements import require_package
from gym_fed.core.text import counted
from gym_fed.data.chat_templates.batches import render_rows
from gym_fed.data.chat_templates.choice import read_chat_template, use_chat_template
from gym_fed.data.chat_templates.conversation import ChatRenderer, write_answered
from gym_fed.data.encoding import require_chat_template
from gym_fed.data.reading import PlacedRow
from gym_fed.data.rows import PlacedDict, Row, place_of
from gym_fed.data.string_rows import is_string_row
from gym_fed.tracking.experiment import ready_tracker
from gym_fed.training.features.base import active_features
from gym_fed.training.model.template_tokens import template_tokenizer, tokenizer_name
from gym_fed.training.rows.encode_part import rows_to_encode
from gym_fed.training.rows.run_rows import rows_to_learn
from gym_fed.training.vision.conversations import RowReader, check_vision_keys, require_conversations

if TYPE_CHECKING:
    from gym_fed.evaluation.graders.base import Grader
    from gym_fed.training.algorithms.base import Algorithm


MOST_ROWS = 1000


def check_config(config: TrainingConfig, num_processes: int | None = None) -> None:
    """Refuse settings that this machine or installation does not support, instead of ignoring or replacing them.

    Args:
        config: The config to check.
        num_processes: Number of processes of the run; by default the current number.
    """
    from gym_fed.training.model.adapters import check_adapters
    from gym_fed.training.model.quantization import check_quantization
    from gym_fed.training.model.reference import check_reference
    from gym_fed.training.processes.group import world_size
    from gym_fed.training.processes.sharding import check_distributed
    from gym_fed.training.rows.batch_size import check_batch_size
    from gym_fed.training.rows.packing import check_packing
    from gym_fed.training.rows.streamed import check_streaming
    from gym_fed.training.rows.tokenized import check_tokenized
    from gym_fed.training.run.spikes import check_spikes

    pick_device(config.device)
    if config.chat_template is not None:
        read_chat_template(config.chat_template)
    processes = world_size() if num_processes is None else num_processes
    check_distributed(config, processes)
    check_privacy(config, processes)
    algorithm = ALGORITHMS.new(config.algorithm)
    algorithm.check(config)
    check_packing(config)
    TUNING.new(config.finetuning).check(config)
    check_quantization(config)
    check_adapters(config)
    check_reference(config)
    OPTIMIZERS.new(config.optimizer).check(config)
    check_spikes(config)
    _check_delta(config)
    check_batch_size(config)
    refuse_first(
        (not config.shuffle and config.privacy, "privacy draws every batch at random"),
        (
            not config.shuffle and algorithm.orders_rows,
            f"{config.algorithm} determines the order of its rows",
        ),
        prefix="shuffle: false, but ",
        remedy="remove the key",
    )
    check_tokenized(config)
    check_streaming(config, processes)
    for name in config.tracking:
        ready_tracker(name)  # refuses a tracker whose package is missing
    for feature in active_features(config).values():
        feature.check(config)


def check_inputs(config: TrainingConfig) -> None:
    """Refuse a config whose model, rows or graders are missing, or whose chat template does not accept the rows.

    The first thousand rows of every source are read, except for sources on the Hub.
    """
    from gym_fed.data.sources import source_rows
    from gym_fed.evaluation.graders.base import build_graders

    if config.model is None and config.model_init is None:
        raise GymError(ErrorCode.CONFIG_INVALID, "model: not set", "set model or model_init")
    resolve(str(tokenizer_name(config)))
    check_vision_keys(config)
    refuse_first((not config.data, "data: no rows to train on", "list at least one path or tasks entry"))
    for source in (*config.data, *config.eval_data):
        if source.hub is None and source.name is None and not check_template(config, source_rows(source)):
            name = source.path or source.dataset
            raise GymError(ErrorCode.DATA_INVALID, f"data: {name} contains no rows", "add at least one")
    check_graders(config, build_graders(config.graders))


def check_template(config: TrainingConfig, rows: Iterable[PlacedRow]) -> int:
    """Render the first ``MOST_ROWS`` rows with the chat template, as the run does.

    Returns:
        The number of rendered rows, at most ``MOST_ROWS``.

    Raises:
        GymError: ``DATA_INVALID`` with a row that the template refuses or renders incompletely, or whose answers cannot
            be located; also for a tokenizer without a template.
    """
    from gym_fed.training.algorithms.sft import Sft

    algorithm = ALGORITHMS.new(config.algorithm)
    placed = [PlacedDict.of(row, place) for place, row in islice(rows, MOST_ROWS)]
    learned = rows_to_learn(config, placed)
    if not any(_is_chat(row) or is_string_row(row) for row in learned):
        return len(placed)
    if algorithm.reads_images and config.model is not None and is_vision_model(config.model):
        processor = use_chat_template(load_processor(config.model), config.chat_template)
        _read_media(config, algorithm, processor, rows_to_encode(config, processor, learned))
        return len(placed)
    tokenizer = template_tokenizer(load_tokenizer(str(tokenizer_name(config))), config)
    chats = [row for row in rows_to_encode(config, tokenizer, learned) if _is_chat(row)]
    if not chats:
        return len(placed)
    require_chat_template(tokenizer)
    if not isinstance(algorithm, Sft):
        for number, row in enumerate(chats, 1):
            _render_answers(config, tokenizer, row, place_of(row, number))
        return len(placed)
    assistant_only = algorithm.assistant_only(config)
    renderer = ChatRenderer(tokenizer, assistant_only, config.mask_history, config.reasoning)
    render_rows(renderer, [(row, place_of(row, number)) for number, row in enumerate(chats, 1)])
    return len(placed)


def _read_media(config: TrainingConfig, algorithm: Algorithm, processor: Any, rows: Sequence[Row]) -> None:
    """Render rows for a model that reads media, as the run does."""
    from gym_fed.training.algorithms.sft import Sft
    from gym_fed.training.vision.pairs import read_pairs

    reader = RowReader(config, processor)
    if not isinstance(algorithm, Sft):
        read_pairs(reader, rows)
        return
    require_conversations(rows)
    reader.read(rows, algorithm.assistant_only(config))


def check_graders(config: TrainingConfig, graders: Sequence[Grader]) -> None:
    """Refuse graders with the same name, and a run that needs rewards but has no graders."""
    names = [grader.name for grader in graders]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    no_rewards = ALGORITHMS.new(config.algorithm).needs_graders and not names
    reason = f"{config.algorithm} learns from rewards, but there are no graders"
    refuse_first(
        (no_rewards, reason, "list at least one, such as: graders: [{grader: exact}]"),
        (duplicate is not None, f"two graders are called {duplicate!r}", "name them differently"),
        prefix="graders: ",
    )


def require_training(config: TrainingConfig) -> None:
    """Refuse a config that is only for preprocessing or evaluation."""
    others = {"preprocess_only": "rows.preprocess.preprocess", "evaluate_only": "evaluating.evaluate"}
    for key, function in others.items():
        remedy = f"call gym_fed.training.{function}(config), or set it to false"
        reason = f"{key}: nothing to train, since it is set"
        refuse_first((getattr(config, key), reason, remedy), code=ErrorCode.USAGE)


def check_privacy(config: TrainingConfig, num_processes: int) -> None:
    """Refuse settings that would invalidate epsilon, before anything is loaded."""
    if config.privacy is None:
        return
    require_package("opacus", "privacy", "privacy")
    require_package("dp_accounting", "privacy", "privacy")
    algorithm, tuning = ALGORITHMS.type_of(config.algorithm), TUNING.type_of(config.finetuning)
    features = [name for name, feature in active_features(config).items() if not feature.per_example]
    packs = config.packing or (config.packing is None and algorithm.packing_default)
    samples = any(source.dataset or (source.num_examples and not source.tasks) for source in config.data)
    weighs = any(source.weight != 1 for source in config.data)
    clips = config.max_grad_norm != TrainingConfig.model_fields["max_grad_norm"].default
    noised = OPTIMIZERS.new(config.optimizer).per_example
    untried = "not tested with per-example gradients"
    refuse_first(
        (
            not algorithm.per_example,
            f"algorithm: {config.algorithm} is not accounted for",
            "use sft or pretrain",
        ),
        (not tuning.per_example, f"finetuning: {config.finetuning} is {untried}", "use full, freeze or lora"),
        (config.lora and config.lora.use_dora, f"lora.use_dora: its magnitudes are {untried}"),
        (
            not noised,
            f"optimizer: {config.optimizer} may use more than noised gradients",
            "use adamw or sgd",
        ),
        (packs, "packing: clipping does not bound a row that is packed with others", "set packing: false"),
        (weighs, "data.weight: a row may be used several times, or depend on the others", "set it to 1"),
        (samples, "data.num_examples, data.dataset: the rows depend on each other", "set path to a file"),
        (config.eval_split, "eval_split: the held-out rows depend on the others", "set eval_data"),
        (config.group_by_length, "group_by_length: batches would depend on the rows"),
        (
            clips,
            "max_grad_norm: batches would be clipped, not individual examples",
            "set privacy.max_grad_norm",
        ),
        (config.loss_spikes, "loss_spikes: the training loss is not noised"),
        (config.auto_batch_size, "auto_batch_size: runs trial batches", "set per_device_train_batch_size"),
        (features, f"{', '.join(features)}: {untried}"),
        (config.quantization, f"quantization: {untried}"),
        (config.dtype != "float32", f"dtype: {config.dtype} makes clipping inexact", "set dtype: float32"),
        (
            num_processes > 1,
            f"{counted(num_processes, 'process')}: each would add its own noise",
            "set --nproc 1",
        ),
        suffix=", but privacy is set",
        remedy="remove it",
    )


def _check_delta(config: TrainingConfig) -> None:
    """Refuse ``save_delta`` if the result is not a delta of a base that is available to others."""
    if config.save_delta is None:
        return
    strategy = config.distributed_strategy
    refuse_first(
        (config.model is None, "the base has no name: set model"),
        (
            ALGORITHMS.type_of(config.algorithm).task_type != "CAUSAL_LM",
            "a reward model has a different head",
        ),
        (config.rope_scaling, "a delta does not contain rope_scaling"),
        (config.mixture_of_depths, "a delta does not contain the routers of mixture_of_depths"),
        (config.splits_state, f"under distributed.strategy {strategy} no process has the whole model"),
        prefix="save_delta: ",
        remedy="remove it, and use gym delta encode after the run, if possible",
    )


def _render_answers(config: TrainingConfig, tokenizer: Any, row: Row, place: str) -> None:
    if "messages" in row:  # the algorithm uses these rows unchanged
        return
    answers: tuple[Any, ...] = ([], row.get("chosen"), row.get("rejected"), row.get("completion"))
    for answer in answers:
        if answer is not None and not isinstance(answer, str):
            tools = row.get("tools") or None
            write_answered(tokenizer, row["prompt"], answer, tools, place, reasoning=config.reasoning)


def _is_chat(row: Row) -> bool:
    return "messages" in row or isinstance(row.get("prompt"), list)
