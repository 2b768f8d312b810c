"""Choose values for the unset keys of a run, by model, rows and memory, with the rules of ``config.train.defaults``.

A resumed run uses the values in its ``config.yaml``, so that more memory or a newer release does not change the run.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gym_fed.config.train.defaults import (
    LARGE,
    MEMORY_KEYS,
    METHOD_KEYS,
    ROW_KEYS,
    Default,
    RowFacts,
    applied,
    high_rate,
    method_defaults,
    row_defaults,
    split_default,
)
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core import console
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.plain_yaml import parse_value
from gym_fed.core.registries import ALGORITHMS
from gym_fed.training.processes.ranks import is_main, world_size
from gym_fed.training.rows.encode_part import LearnedRows, rows_to_encode
from gym_fed.training.run.folder import RunFolder
from gym_fed.training.run.reproducibility import RunWarning

_SAMPLE_ROWS = 512
_SAME_KEYS = ("model", "algorithm", "data", "eval_data")
"""Keys that identify a config as that of the unfinished run in its folder."""


class Defaults:
    """Chooses the defaults of one run, and remembers them for its report.

    Args:
        config: The run's config, as given by the user.
        model: The model in memory; None if ``config.model`` will be loaded.
        check: True if the run is checked on held-out rows.
    """

    def __init__(self, config: TrainingConfig, model: Any = None, *, check: bool = False) -> None:
        self.chosen: list[Default] = []
        self.num_weights = _num_weights(config, model)
        self._check = check
        self._stored = _stored(config)

    @property
    def is_large(self) -> bool:
        """True if values are chosen for a large pre-trained model; False if the schema's defaults apply."""
        return self.num_weights > LARGE

    def for_method(self, config: TrainingConfig) -> TrainingConfig:
        """Return ``config`` with tuning method, learning rate and schedule set; called before anything is loaded."""
        from gym_fed.base.modeling.weight_count import prequantised

        is_quantized = config.quantization is not None or (
            config.model is not None and self.is_large and prequantised(config.model) is not None
        )
        return self._choose(
            config, METHOD_KEYS, lambda: method_defaults(config, self.num_weights, is_quantized=is_quantized)
        )

    def splitting(self, config: TrainingConfig, num_rows: int) -> TrainingConfig:
        """Return ``config`` with ``eval_split`` set if the run is checked and the config specifies no held-out rows."""

        def choose() -> list[Default]:
            split = split_default(config, num_rows) if self._check else None
            return [] if split is None else [split]

        return self._choose(config, ("eval_split",), choose)

    def for_rows(
        self, config: TrainingConfig, given: tuple[Any, Any] | None, rows: Sequence[dict[str, Any]]
    ) -> TrainingConfig:
        """Return ``config`` with row length, batch size and epochs set, and print all chosen values.

        Called before the model is loaded.

        Args:
            config: The config from ``for_method``.
            given: Model and tokenizer in memory; None if ``config.model`` will be loaded.
            rows: The training rows; empty if they were encoded earlier.
        """
        if self.is_large and rows:
            keys = (*ROW_KEYS, *MEMORY_KEYS)
            config = self._choose(config, keys, lambda: _choose_by_rows(config, given, rows))
        if self.chosen and is_main() and not console.wants_json():
            _report(self.chosen)
        if self._check and self.is_large and is_main() and (problem := high_rate(config)):
            warnings.warn(problem, RunWarning, stacklevel=2)
        return config

    def _choose(
        self, config: TrainingConfig, keys: Sequence[str], choose: Callable[[], list[Default]]
    ) -> TrainingConfig:
        """Return ``config`` with values for ``keys``, from the unfinished run if there is one, else from ``choose``."""
        defaults = choose() if self._stored is None else _stored_choices(config, keys, self._stored)
        self.chosen += defaults
        return applied(config, defaults)


def _stored_choices(config: TrainingConfig, keys: Sequence[str], stored: dict[str, Any]) -> list[Default]:
    fields, unset = type(config).model_fields, [key for key in keys if key not in config.model_fields_set]
    values = {key: stored.get(key, fields[key].default) for key in unset}
    reason = "as in the unfinished run in output_dir"
    return [Default(key, value, reason) for key, value in values.items() if value != getattr(config, key)]


def with_defaults(config: TrainingConfig, *, check: bool = True) -> TrainingConfig:
    """Return ``config`` with the values that its run would choose; used for planning.

    Values that depend on the rows stay unset if the rows or the tokenizer are not on this machine.

    Args:
        config: The config, as given by the user.
        check: True if the run will be checked on held-out rows.
    """
    from gym_fed.base.downloads import missing_model
    from gym_fed.training.rows.run_rows import rows_of_run

    defaults = Defaults(config, check=check)
    config = defaults.for_method(config)
    is_here = config.model is None or not missing_model(config.model)
    if not is_here or not config.data or any(source.hub or source.name for source in config.data):
        return defaults.for_rows(config, None, [])

    def split_of(num_rows: int) -> float:
        nonlocal config
        config = defaults.splitting(config, num_rows)
        return config.eval_split

    rows, _ = rows_of_run(config, None, None, split_of)
    return defaults.for_rows(config, None, rows)


def _report(chosen: Sequence[Default]) -> None:
    """Print the chosen values and the reasons on standard error."""
    console.err.print(
        "chosen for this model and these rows; each is a key of the config, so a flag changes it:"
    )
    rows = []
    for default in chosen:
        value = f"{default.value:g}" if isinstance(default.value, float) else str(default.value)
        rows.append((default.key, value, default.reason))
    console.print_columns(rows, wrapped=True, to=console.err)


def _choose_by_rows(
    config: TrainingConfig, given: tuple[Any, Any] | None, rows: Sequence[dict[str, Any]]
) -> list[Default]:
    from gym_fed.base.models import pick_device
    from gym_fed.training.planning.memory import memory_of
    from gym_fed.training.planning.plan import available_bytes
    from gym_fed.training.planning.sizes import sizes_of

    device = pick_device(config.device)
    try:
        sizes = sizes_of(config)
        longest, usual = _lengths(config, _tokenizer(config, given), rows)
        facts = RowFacts(len(rows), longest, usual, _context(config), config.data_parallel_size(world_size()))
    except GymError as error:
        if error.code is ErrorCode.CONFIG_INVALID and config.model is None:
            return []  # a model in memory that the config does not name cannot be estimated
        raise
    return row_defaults(
        config,
        facts,
        lambda tried: memory_of(tried, sizes, device=device.type, processes=world_size()).peak,
        available_bytes(device),
    )


def _tokenizer(config: TrainingConfig, given: tuple[Any, Any] | None) -> Any:
    """Return the run's tokenizer with its chat template; None if the model has a processor."""
    from gym_fed.base.modeling.processors import is_processor, is_vision_model
    from gym_fed.base.models import load_tokenizer
    from gym_fed.data.chat_templates.choice import use_chat_template

    if given is not None:
        tokenizer = given[1]
    elif is_vision_model(str(config.model)):
        return None
    else:
        tokenizer = load_tokenizer(str(config.model))
    return None if is_processor(tokenizer) else use_chat_template(tokenizer, config.chat_template)


def _num_weights(config: TrainingConfig, model: Any) -> int:
    """Return the number of weights of the pre-trained model; 0 if there is none or it cannot be read."""
    if model is not None:
        return sum(value.numel() for value in model.parameters())
    if config.model is None:
        return 0
    from gym_fed.base.modeling.weight_count import count_stored_weights
    from gym_fed.training.planning.sizes import count_model

    if (count := count_stored_weights(config.model)) is not None and not _is_adapter(config.model):
        return count
    try:
        return count_model(config.model)
    except GymError:
        return 0


def _is_adapter(name: str) -> bool:
    """Return True if a model folder contains an adapter without its base."""
    from gym_fed.base.models import resolve

    return (Path(resolve(name)) / "adapter_config.json").is_file()


def _stored(config: TrainingConfig) -> dict[str, Any] | None:
    """Return the config of the unfinished run in ``output_dir`` that ``config`` resumes; None if there is none.

    Also None for a run with a different model, algorithm or rows, which is refused when the folder is opened.
    """
    folder = config.output_dir
    if not RunFolder(folder).is_unfinished():
        return None
    try:
        stored = parse_value((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # reported when the folder is opened
    now = config.model_dump(mode="json", include=set(_SAME_KEYS))
    if not isinstance(stored, dict) or any(stored.get(key) != now[key] for key in _SAME_KEYS):
        return None
    return stored


def _lengths(config: TrainingConfig, tokenizer: Any, rows: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Return the maximum and the 95th percentile of tokens per row; 0 if rows are packed.

    Only the rows with the most characters and a sample of the others are tokenised.
    """
    algorithm = ALGORITHMS.new(config.algorithm)
    is_packed = algorithm.packing_default if config.packing is None else bool(config.packing)
    if tokenizer is None or is_packed or "max_length" in config.model_fields_set:
        return 0, 0
    if isinstance(rows, LearnedRows):
        sizes = rows.sizes().tolist()
    else:
        sizes = [len(json.dumps(row, default=repr)) for row in rows]
    order = sorted(range(len(rows)), key=sizes.__getitem__, reverse=True)
    sample = order[:_SAMPLE_ROWS] + order[_SAMPLE_ROWS :: max(1, len(order) // _SAMPLE_ROWS)]
    usual_size = sizes[order[len(order) // 20]]
    longest = []
    for is_long in (True, False):
        group = [rows[i] for i in sample if (sizes[i] > usual_size) is is_long]
        turns = rows_to_encode(config, tokenizer, group)
        # Rows without a learned token have no length.
        longest.append(max(algorithm.lengths(config, tokenizer, turns), default=0))
    return max(longest), longest[-1]


def _context(config: TrainingConfig) -> int | None:
    """Return the context length in the model's config."""
    from gym_fed.training.model.architecture import fresh_config

    text = fresh_config(config).get_text_config()
    context = getattr(text, "max_position_embeddings", None)
    if config.rope_scaling is not None and context is not None:
        return int(context * config.rope_scaling.factor)
    return context
