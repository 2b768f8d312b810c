"""Pack rows by best-fit decreasing, like TRL, and refuse packing for models that do not support it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Literal

from gym_fed.base.modeling.attention_state import ISOLATES_ROWS, carried_state
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import refuse_first
from gym_fed.core.registries import ALGORITHMS
from gym_fed.data.encoding import Encoded
from gym_fed.training.model.architecture import known_architecture

_PACKED_AT_ONCE = 1000
"""Number of rows that are packed together, as in TRL."""


def pack_best_fit(rows: Iterable[Encoded], max_length: int) -> Iterator[dict[str, Any]]:
    """Pack encoded rows by best-fit decreasing (Ding et al. 2024, section 3), a thousand rows at a time.

    Args:
        rows: ``{"input_ids", "labels"}``, none longer than ``max_length``.
        max_length: Maximum number of tokens per packed row.

    Yields:
        ``{"input_ids", "labels", "seq_lengths"}``. From ``seq_lengths``, TRL's collator computes positions that restart
        with each row, and transformers computes a block mask.
    """
    from datasets import Dataset
    from trl import pack_dataset

    from gym_fed.training.trl_glue import quiet_datasets

    source = iter(rows)
    while chunk := list(islice(source, _PACKED_AT_ONCE)):
        columns = {key: [row[key] for row in chunk] for key in ("input_ids", "labels")}
        with quiet_datasets():
            packed_rows = pack_dataset(Dataset.from_dict(columns), max_length, "bfd")
        yield from packed_rows


def check_packing(config: TrainingConfig) -> None:
    """Refuse packing for a model that does not support it, before the model is loaded."""
    if _packing(config) and (architecture := known_architecture(config)) is not None:
        require_packable(architecture, config)


def require_packable(model_config: Any, config: TrainingConfig) -> None:
    """Refuse packing for a model in which one packed row would affect the next one.

    With ``True``, rows in a sequence may attend to each other, but must not share a recurrent state, since its code
    handles padding and positions differently. With ``bfd``, rows must have the same loss and gradient as without
    packing.

    Args:
        model_config: The model's ``transformers`` config.
        config: The run's config.
    """
    if not (packing := _packing(config)):
        return
    value, kind = str(packing).lower(), model_config.model_type
    state = carried_state(model_config)
    routed = config.mixture_of_depths or getattr(model_config, "mixture_of_depths", None)
    leaks = f"{kind} carries state from token to token ({state}), which would leak into the next row"
    routes = "the routers of mixture_of_depths select from the tokens of all packed rows"
    untested = (
        f"{kind} is not among the architectures whose packed rows are known not to attend to each other"
    )
    refuse_first(
        (state is not None, leaks, "set packing: false"),
        (packing == "bfd" and routed, routes),
        (packing == "bfd" and kind not in ISOLATES_ROWS, untested),
        prefix=f"packing: {value}: ",
        remedy="set packing: false, or packing: true, where rows attend to each other",
    )


def _packing(config: TrainingConfig) -> bool | Literal["bfd"]:
    value: bool | Literal["bfd"] = ALGORITHMS.new(config.algorithm).packing(config)
    return value
