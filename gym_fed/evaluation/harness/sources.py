"""What the harness is given: a task's definition and rows, on this machine alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Protocol

from gym_fed.core.errors import ErrorCode, GymError

LOCAL_FORMATS = ("json", "csv", "text", "parquet")
"""Values of a task's ``dataset_path`` that read files of this machine."""
RENDERED = "rendered"
"""Of the metadata's ``conversation``: the rows are in the template already."""


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


def applies_template(source: TaskSource, asked: bool | None) -> bool:
    """Whether a task's prompts are put into the model's chat template.

    Args:
        source: The task.
        asked: What the caller wants; None: as the task says, by ``conversation`` of its metadata, which is ours.
            lm-evaluation-harness applies none unless it is asked to, and its tasks say nothing.
    """
    stated = (source.config.get("metadata") or {}).get("conversation")
    return stated != RENDERED and (stated is True if asked is None else asked)


def is_rendered(source: TaskSource) -> bool:
    """Whether a task's rows are in the model's chat template already."""
    return (source.config.get("metadata") or {}).get("conversation") == RENDERED


def require_local(source: TaskSource) -> None:
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


def row_sha256(row: Any) -> str:
    """Digest of a row, whatever the order of its columns."""
    text = json.dumps(row, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
