"""The interface of schedulers, and the command line that each of them runs."""

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
"""The port at which the machines meet; torchrun's default."""

SECONDS_FOR_A_CHECKPOINT = 300
"""Seconds between SIGTERM and the end of a job."""

_LONGEST_NAME = 40
"""Maximum characters of a job's name: JobSet appends to it, and names of pods have at most 63."""


@dataclass(frozen=True)
class ClusterJob:
    """A run to be started by a scheduler.

    Attributes:
        config: The config that the run will have; its device and output folder are read.
        file: The path of the config file as it was given.
        options: ``KEY=VALUE`` settings that follow it, and options such as ``--no-check``.
        nodes: Number of machines.
        nproc: Number of processes on each.
    """

    config: TrainingConfig
    file: Path
    options: Sequence[str]
    nodes: int
    nproc: int

    @property
    def name(self) -> str:
        """A name for the job, from the output folder: lower-case letters, digits and hyphens."""
        words = re.sub(r"[^a-z0-9]+", "-", f"gym-{self.config.output_dir.name}".lower())
        return words[:_LONGEST_NAME].strip("-")

    @property
    def gpus(self) -> int:
        """GPUs on each machine: one per process, none for a run on CPUs."""
        return 0 if self.config.device == "cpu" else self.nproc

    def words(self, file: str = "") -> list[str]:
        """Return the arguments of the command, without the rendezvous endpoint.

        Args:
            file: Path of the config on those machines; by default as it was given.
        """
        settings = [
            part for word in self.options for part in ((word,) if word.startswith("--") else ("--set", word))
        ]
        size = ["--nnodes", str(self.nodes), "--nproc", str(self.nproc)]
        return ["gym", "train", file or str(self.file), *settings, *size]

    def command(self, endpoint: str, file: str = "") -> str:
        """Return the command as a line for a shell.

        Args:
            endpoint: ``HOST:PORT`` in the shell's own syntax, which is not quoted here; unused with one machine.
            file: As for ``words``.
        """
        words = shlex.join(self.words(file))
        return words if self.nodes == 1 else f'{words} --rdzv-endpoint "{endpoint}"'


class ClusterScheduler(ABC):
    """Writes what an existing scheduler needs to start a run. Nothing is submitted."""

    name: ClassVar[str]

    submit: ClassVar[str]
    """The command that submits the text from a file."""

    @abstractmethod
    def text(self, job: ClusterJob) -> str:
        """Return the text of the scheduler's file."""


class _Plain(yaml.SafeDumper):
    """A YAML dumper for readable output: multi-line strings as blocks, and no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Plain.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def yaml_text(*documents: dict[str, Any]) -> str:
    """Return documents as YAML, with keys in their order."""
    return yaml.dump_all(documents, Dumper=_Plain, sort_keys=False, allow_unicode=True)
