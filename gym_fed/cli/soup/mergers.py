"""The two mergers of `gym soup merge`, and the held-out losses that it reports and gates on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.cli.soup.inputs import Inputs
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted

if TYPE_CHECKING:
    from torch import Tensor

    from gym_fed.base.models import LoadedModel
    from gym_fed.config.hub.soup import SoupRecipe
    from gym_fed.delta.file import DeltaFile
    from gym_fed.evaluation.merge_statistics import SoupLoss
    from gym_fed.soup.method import MergeMethod


class SoupEvaluator:
    """Computes losses on held-out rows, for methods that select by loss, for the report, and for the gate.

    Args:
        base: The loaded base.
        updates: The deltas that a soup is made of.
        heldout: Rows to score soups by; None for none.
        gate: Rows on which no soup may do worse than the base; None for none.
        tolerance: Allowed increase of the loss in nats per token.
    """

    def __init__(
        self,
        base: LoadedModel,
        updates: list[DeltaFile],
        heldout: Path | None,
        gate: Path | None,
        tolerance: float,
    ) -> None:
        from gym_fed.data.reading import load_rows

        self._base, self._updates, self._gate_file, self._tolerance = base, updates, gate, tolerance
        self._rows = {
            key: load_rows(path) for key, path in (("heldout", heldout), ("gate", gate)) if path is not None
        }
        self._base_loss = {key: self._loss(key, []).of_base() for key in self._rows}

    @property
    def has_gate(self) -> bool:
        return "gate" in self._rows

    def score(self, coefficients: Tensor) -> float:
        """Return the negative held-out loss, for ``MergeMethod.choose``."""
        return -self._loss("heldout", self._updates)(coefficients)

    def veto(self, coefficients: Tensor) -> str | None:
        """Return the reason why the gate refuses a soup, for ``MergeMethod.choose``; None if it does not."""
        return self._objection(self._loss("gate", self._updates)(coefficients))

    def verdict(self, soup: DeltaFile) -> dict[str, dict[str, float]]:
        """Return the losses of base and finished soup, by ``heldout`` and ``gate``.

        Raises:
            GymError: ``UPDATE_REFUSED`` if the gate refuses the soup.
        """
        import torch

        losses = {
            key: {"base": self._base_loss[key], "soup": self._loss(key, [soup])(torch.ones(1))}
            for key in self._rows
        }
        objection = self._objection(losses["gate"]["soup"]) if "gate" in losses else None
        if objection:
            raise GymError(
                ErrorCode.UPDATE_REFUSED,
                f"the soup {objection}",
                "nothing was written; omit updates, lower scale, or raise gate.tolerance",
            )
        return losses

    def _objection(self, loss: float) -> str | None:
        max_loss = self._base_loss["gate"] + self._tolerance
        if loss <= max_loss:
            return None
        return f"has loss {loss:.4f} on {self._gate_file}, above the limit of {max_loss:.4f}"

    def _loss(self, key: str, updates: list[DeltaFile]) -> SoupLoss:
        from gym_fed.evaluation.merge_statistics import SoupLoss

        return SoupLoss(self._base.model, self._base.tokenizer, updates, self._rows[key])


@dataclass(frozen=True)
class Opened:
    """The opened inputs of a merge.

    Attributes:
        updates: The updates by their position in the command.
        weights: The weights of these updates, in the same order.
        inputs: The merge's inputs, with the base.
        evaluator: Losses on held-out rows.
        root: The coordinator's own update; None without one.
    """

    updates: dict[int, DeltaFile]
    weights: list[float]
    inputs: Inputs
    evaluator: SoupEvaluator
    root: DeltaFile | None = None


class SoupMerger(ABC):
    """Merges opened updates into an exact soup. Its constructor checks every option of the command.

    Attributes:
        root: The name of the coordinator's own update; None if the rule uses none.
    """

    root: str | None = None

    @abstractmethod
    def run(self, opened: Opened, path: Path, on_tensor: Callable[[str], None]) -> tuple[Any, dict[str, Any]]:
        """Write the exact soup (``compact.EXACT``) to ``path``. Returns the report, and a method's own findings."""


class AggregatorMerger(SoupMerger):
    """Merges by the rules of a recipe: pre-aggregators, then an aggregator."""

    def __init__(self, values: dict[str, Any], root: str | None) -> None:
        from gym_fed.config.hub.soup import SoupRecipe
        from gym_fed.config.yaml.file import validate
        from gym_fed.soup.compact import EXACT
        from gym_fed.soup.pipeline import Pipeline

        self._recipe: SoupRecipe = validate({**values, "codec": EXACT}, SoupRecipe, "options")
        Pipeline.of(self._recipe)
        self.root = root

    def run(self, opened: Opened, path: Path, on_tensor: Callable[[str], None]) -> tuple[Any, dict[str, Any]]:
        from gym_fed.soup.merging import merge as aggregate

        root = opened.root
        updates, spec = list(opened.updates.values()), opened.inputs.spec
        report = aggregate(updates, opened.weights, self._recipe, path, spec, root=root, on_tensor=on_tensor)
        return report, {}


class MethodMerger(SoupMerger):
    """Merges by a merge method."""

    def __init__(
        self, name: str, values: dict[str, Any], statistics: list[Path], count: int, heldout: Path | None
    ) -> None:
        from gym_fed.core.registries import METHODS
        from gym_fed.evaluation.merge_statistics import StatisticsFile, kind_of
        from gym_fed.soup.building import build

        self._method: MergeMethod = build(METHODS.type_of(name), values, "--set")
        kind = self._method.statistics
        if len(statistics) != (count if kind else 0):
            needs = f"{kind} statistics for each of {counted(count, 'update')}" if kind else "no statistics"
            raise GymError(
                ErrorCode.USAGE,
                f"merge method {name!r} needs {needs}, but --statistics was given {counted(len(statistics), 'time')}",
                "create them with gym soup statistics, one for each update" if kind else "omit --statistics",
            )
        if self._method.uses_score and heldout is None:
            raise GymError(
                ErrorCode.USAGE, f"merge method {name!r} selects by held-out loss", "pass rows with --heldout"
            )
        self._statistics = [StatisticsFile(path, kind_of(str(kind))) for path in statistics]

    def run(self, opened: Opened, path: Path, on_tensor: Callable[[str], None]) -> tuple[Any, dict[str, Any]]:
        from gym_fed.delta.base import model_tensors
        from gym_fed.soup.compact import EXACT
        from gym_fed.soup.model_merging import merge_models

        chooses, inputs, evaluator = self._method.uses_score, opened.inputs, opened.evaluator
        report = merge_models(
            list(opened.updates.values()),
            opened.weights,
            self._method,
            EXACT,
            path,
            inputs.spec,
            base=model_tensors(inputs.base.model) if self._method.uses_base else None,
            statistics=[self._statistics[index] for index in opened.updates] if self._statistics else (),
            score=evaluator.score if chooses else None,
            gate=evaluator.veto if chooses and evaluator.has_gate else None,
            on_tensor=on_tensor,
        )
        return report, dict(report.found)
