"""How an export is written: what its user chooses, whatever the format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gym_fed.config.delta import CodecPolicy
from gym_fed.export.process import Processes, Report, no_report


@dataclass(frozen=True)
class Options:
    """How it is written.

    Attributes:
        dtype: Type of the weights on disk; None keeps the source's.
        shard_size: Most bytes of one weights' file, as ``5GB``.
        codec: Of ``delta``.
        quantization: One of the format's ``quantizations``; empty for its first, or none.
        report: Gets what a long export is at: ``(stage, done, total)``.
        rank: Of the LoRA that a delta is exported as; None: the format's own.
        rows: Held-out rows to measure on what that LoRA keeps; or rows that calibrate a quantisation.
        rows_name: What they are called.
        processes: Run what is done in processes of their own.
    """

    dtype: str | None = None
    shard_size: str = "5GB"
    codec: CodecPolicy | None = None
    quantization: str = ""
    report: Report = no_report
    rank: int | None = None
    rows: Sequence[dict[str, Any]] = ()
    rows_name: str = ""
    processes: Processes = field(default_factory=Processes, compare=False, repr=False)
