"""Make a run repeatable on one machine, and record its environment.

``environment.json`` contains versions, hardware, git commit and digests, but no environment variables, host or user
names, or paths. A resume in a different environment warns about the differences, since results may differ, too.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.core.files import write_atomically
from gym_fed.tracking.environment import machine_facts

if TYPE_CHECKING:
    from gym_fed.config.train.run import Reproducibility
    from gym_fed.config.train.training import TrainingConfig


class RunWarning(UserWarning):
    """A warning that does not end the run."""


def random_state_restorer() -> Callable[[], None]:
    """Return a function that restores the current random states of Python, numpy, and torch on CPU and GPUs."""
    import numpy as np
    import torch

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def restore() -> None:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if on_cuda:
            torch.cuda.set_rng_state_all(on_cuda)

    return restore


@contextmanager
def deterministic(settings: Reproducibility) -> Iterator[None]:
    """Apply ``settings.deterministic`` to torch within a context. It must be entered before CUDA is first used.

    https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    import torch

    if settings.deterministic is False:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", settings.cublas_workspace)
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
    )
    torch.use_deterministic_algorithms(True, warn_only=settings.deterministic == "warn")
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before[2:]


def record_environment(folder: Path, config: TrainingConfig, data_digest: str) -> None:
    """Write ``environment.json``; on a resume, add the differences and warn about them."""
    if not config.reproducibility.record:
        return
    file = folder / "environment.json"
    now = environment(config, data_digest)
    if file.exists():
        record = json.loads(file.read_text(encoding="utf-8"))
        last = {**record["environment"], **(record["resumed_with"][-1] if record["resumed_with"] else {})}
        # The run folder already compares config and data.
        changed = {k: v for k, v in now.items() if last.get(k) != v and not k.endswith("_sha256")}
        if not changed:
            return
        differences = "; ".join(_difference(key, last.get(key), value) for key, value in changed.items())
        warnings.warn(
            f"{folder}: resumed in a different environment, so results may differ: {differences}",
            RunWarning,
            stacklevel=2,
        )
        record["resumed_with"].append(changed)
    else:
        record = {"environment": now, "resumed_with": []}
    write_atomically(file, f"{json.dumps(record, indent=2)}\n".encode())


def environment(config: TrainingConfig, data_digest: str) -> dict[str, Any]:
    """Return the properties of the environment that may change a run's results, as JSON values."""
    settings = config.model_dump(mode="json", exclude={"output_dir"})
    return {
        **machine_facts(),
        "deterministic": config.reproducibility.deterministic,
        "seed": config.seed,
        "config_sha256": hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest(),
        "data_sha256": data_digest,
    }


def _difference(key: str, old: Any, new: Any) -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        return ", ".join(
            f"{name} was {old.get(name)} and is {new.get(name)}"
            for name in sorted({*old, *new})
            if old.get(name) != new.get(name)
        )
    return f"{key} was {old} and is {new}"
