"""Define the interface of schedulers, and the command line that they run."""

from __future__ import annotations

import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import yaml

from gym_fed.config.train.training import TrainingConfig

PORT = 29500
"""The port of the rendezvous; torchrun's default."""

CHECKPOINT_SECONDS = 300
"""Seconds between SIGTERM and the end of a job, in which it can write a checkpoint."""

_MAX_NAME_CHARS = 40
"""Maximum number of characters of a job's name. JobSet appends to it, and pod names have at most 63 characters."""


@dataclass(frozen=True)
class ClusterJob:
    """A run that a scheduler starts.

    Attributes:
        config: The run's config, of which only the device and the output folder are read.
        file: The path of the config file, as given on the command line.
        options: ``KEY=VALUE`` settings after the file, and options such as ``--no-check``.
        nodes: Number of machines.
        nproc: Number of processes per machine.
    """

    config: TrainingConfig
    file: Path
    options: Sequence[str]
    nodes: int
    nproc: int

    @property
    def name(self) -> str:
        """The name of the job, derived from the output folder: lower-case letters, digits and hyphens."""
        name = re.sub(r"[^a-z0-9]+", "-", f"gym-{self.config.output_dir.name}".lower())
        return name[:_MAX_NAME_CHARS].strip("-")

    @property
    def gpus(self) -> int:
        """The number of GPUs per machine: one per process, or none for a run on CPUs."""
        return 0 if self.config.device == "cpu" else self.nproc

    def arguments(self, file: str = "") -> list[str]:
        """Return the arguments of the command, without the rendezvous endpoint.

        Args:
            file: Path of the config on those machines; by default, the given path.
        """
        arguments = ["gym", "train", file or str(self.file)]
        for option in self.options:
            arguments += [option] if option.startswith("--") else ["--set", option]
        return [*arguments, "--nnodes", str(self.nodes), "--nproc", str(self.nproc)]

    def command(self, endpoint: str, file: str = "") -> str:
        """Return the command as a shell command line.

        Args:
            endpoint: ``HOST:PORT``, which may contain shell variables; unused for one machine.
            file: Path of the config, as in ``arguments``.
        """
        line = shlex.join(self.arguments(file))
        return line if self.nodes == 1 else f'{line} --rdzv-endpoint "{endpoint}"'


class ClusterScheduler(ABC):
    """Writes a scheduler's job file for a run. Nothing is submitted."""

    name: ClassVar[str]

    submit: ClassVar[str]
    """The command that submits the file."""

    @abstractmethod
    def text(self, job: ClusterJob) -> str:
        """Return the text of the scheduler's file."""


class _Plain(yaml.SafeDumper):
    """A YAML dumper for readable output, with multi-line strings as blocks and without anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_string(dumper: _Plain, text: str) -> Any:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Plain.add_representer(str, _represent_string)


def yaml_text(*documents: dict[str, Any]) -> str:
    """Return documents as YAML, with keys in their original order."""
    return yaml.dump_all(documents, Dumper=_Plain, sort_keys=False, allow_unicode=True)
