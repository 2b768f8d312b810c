"""Our methods under their names in other tools."""

from __future__ import annotations

from typing import Any

from gym_fed.core.aliases import note


def fit(trainer: Any, *given: Any, **named: Any) -> Any:
    """``Trainer.train``."""
    note("trainer.fit", "`trainer.train`")
    return trainer.train(*given, **named)


def build(pipeline: Any) -> Any:
    """Return the pipeline itself, which is iterable: rows are read lazily."""
    note("DataPipeline.build", "not needed (a pipeline gives rows as it is gone through)")
    return pipeline


def apply_deltasoup(trainer: Any, settings: Any = None) -> Any:
    """``Trainer.apply_deltasoup`` with the global version of the hub that this machine has joined.

    Raises:
        GymError: ``NOT_FOUND`` where no soup of a hub is on this machine.
    """
    from gym_fed.interop.joined import newest_version

    others = {"hub": newest_version(trainer.config)}
    note("trainer.apply_deltasoup()", '`trainer.apply_deltasoup({"hub": MODEL})`')
    return trainer.apply_deltasoup(others, settings)
