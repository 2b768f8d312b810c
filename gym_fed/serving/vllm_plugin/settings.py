"""The settings that the gateway passes to the plug-in in environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_OBJECTS, _KERNEL = "GYM_VLLM_OBJECTS", "GYM_VLLM_KERNEL"


@dataclass(frozen=True)
class PluginSettings:
    """The settings of the plug-in.

    Attributes:
        objects: The folder ``objects/`` of the variant store; None without variants.
        kernel: The CPU kernel of sign deltas: ``exact``, ``lookup`` or ``lookup16``.
    """

    objects: Path | None
    kernel: str = "exact"

    def environment(self) -> dict[str, str]:
        """Return the environment variables that ``read`` reads."""
        objects = "" if self.objects is None else str(self.objects)
        return {_OBJECTS: objects, _KERNEL: self.kernel}

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> PluginSettings:
        """Read the settings of this process."""
        objects = environment.get(_OBJECTS, "")
        return cls(Path(objects) if objects else None, environment.get(_KERNEL, "exact"))
