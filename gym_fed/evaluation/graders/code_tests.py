"""Functional correctness of code: its tests pass in a sandbox (Chen et al. 2021, "HumanEval")."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from pydantic import Field

from gym_fed.config.train.graders import GraderConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.graders._sandbox import Sandbox
from gym_fed.evaluation.graders.base import Grader, Sample

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


class CodeTestsConfig(GraderConfig):
    """1 where the answer's Python code passes the row's tests in a sandbox, else 0."""

    column: str = "tests"
    """The row's column with the tests: Python source, or a list of sources. A HumanEval row's ``entry_point`` is
    called as ``check(entry_point)`` behind them."""

    continues_prompt: bool = False
    """The answer continues where the prompt's code ends, as in HumanEval; else it stands alone."""

    partial: bool = False
    """Of a list of tests, reward the share that pass, each in a process of its own; else all must pass."""

    isolation: Literal["namespaces", "process"] = "namespaces"
    """``namespaces`` (Linux) cuts off the network and all files but Python's; ``process`` has resource limits only,
    for machines inside which namespaces are forbidden and whose files may be lost."""

    timeout_seconds: float = Field(default=5.0, gt=0, le=600)
    """Wall time for each program; CPU time is limited to the same, rounded up."""

    memory_bytes: int = Field(default=512 * 2**20, ge=64 * 2**20)
    """Address space of each process."""

    max_file_bytes: int = Field(default=16 * 2**20, ge=1)
    """Largest file; under ``namespaces`` all files together."""

    max_processes: int = Field(default=16, ge=1)
    """Processes and threads a program may have. Under ``process`` all of the user's count, so there it is often
    the machine's other work that reaches it, and root is not bound by it."""

    workers: int = Field(default=2, ge=1, le=256)
    """Programs that run at once."""


class CodeTests(Grader):
    """1 if all tests of the row complete after the answer's code; with ``partial``, the fraction that do."""

    Settings = CodeTestsConfig
    config: CodeTestsConfig

    def __init__(self, config: CodeTestsConfig) -> None:
        super().__init__(config)
        self._sandbox = Sandbox(
            isolation=config.isolation,
            timeout_seconds=config.timeout_seconds,
            memory_bytes=config.memory_bytes,
            max_file_bytes=config.max_file_bytes,
            max_processes=config.max_processes,
        )

    def setup(self) -> None:
        self._sandbox.check()

    def grade(self, samples: Sequence[Sample]) -> list[float]:
        jobs = [(place, job) for place, sample in enumerate(samples) for job in self._jobs(sample)]
        passed: list[list[bool]] = [[] for _ in samples]
        with ThreadPoolExecutor(self.config.workers) as pool:
            for (place, _), result in zip(
                jobs, pool.map(lambda job: self._sandbox.passes(*job[1]), jobs), strict=True
            ):
                passed[place].append(result)
        return [sum(results) / len(results) for results in passed]

    def _jobs(self, sample: Sample) -> list[tuple[str, str]]:
        """Return code and tests of each process that the sample needs."""
        code = code_in(sample.completion)
        if self.config.continues_prompt:
            code = sample.prompt_text() + code
        tests = sample.column(self.config.column, self.name)
        parts = [str(test) for test in tests] if isinstance(tests, list | tuple) else [str(tests)]
        if not any(part.strip() for part in parts):
            raise GymError(
                ErrorCode.DATA_INVALID, f"grader {self.name}: {self.config.column!r} of a row is empty"
            )
        entry_point = sample.row.get("entry_point")
        call = f"\ncheck({entry_point})\n" if entry_point else ""
        if not self.config.partial:
            parts = ["\n".join(parts)]
        return [(code, part + call) for part in parts]


def code_in(text: str) -> str:
    """Return the last fenced Python block, or the whole text if there is none."""
    blocks = _FENCED.findall(text)
    return str(blocks[-1]) if blocks else text
