"""What `gym soup merge` does once its words are read: open, merge by aggregator or method, judge, put in place."""

from __future__ import annotations

import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from gym_fed import console
from gym_fed.cli.soup.base import base_of
from gym_fed.errors import ErrorCode, GymError

if TYPE_CHECKING:
    from torch import Tensor

    from gym_fed.config.hub.soup import SoupRecipe
    from gym_fed.delta.base import BaseSpec
    from gym_fed.delta.file import DeltaFile
    from gym_fed.evaluation.soup_loss import SoupLoss
    from gym_fed.models import LoadedModel
    from gym_fed.soup.method import MergeMethod


class Inputs:
    """Opens updates of one base; files made on the way lie in ``folder``."""

    def __init__(self, base: LoadedModel, spec: BaseSpec, folder: Path, stack: ExitStack) -> None:
        self.base = base
        self.spec, self._folder, self._stack = spec, folder, stack
        self._made = 0

    def open(self, name: str) -> DeltaFile:
        """A ``.gymdelta``, or the difference of a model folder or LoRA run from the base, in float32.

        Raises:
            GymError: For what cannot be read, or is not of this base.
        """
        from gym_fed.delta.file import DeltaFile

        path = Path(name)
        if not (path.is_file() or path.suffix == ".gymdelta"):
            path = self._difference(name)
        return self._stack.enter_context(DeltaFile.open(path, self.spec))

    def _difference(self, name: str) -> Path:
        from gym_fed.config.delta import CodecPolicy
        from gym_fed.delta.encode import encode_delta, lora_delta
        from gym_fed.models import load_model

        tuned: Any = load_model(name).model
        self._made += 1
        path = self._folder / f"{self._made}.gymdelta"
        if hasattr(tuned, "peft_config"):
            if (factors := _factors_alone(tuned, self.base.model)) is not None:
                policy = CodecPolicy(codec="lora", lora_rank=1, factors="float32", error_feedback=False)
                lora_delta(factors, path, self.spec, policy=policy)
                return path
            tuned = tuned.merge_and_unload()
        exact = CodecPolicy(codec="dense", dense_dtype="float32", error_feedback=False)
        encode_delta(tuned, self.base.model, exact, path, self.spec)
        return path


def _factors_alone(tuned: Any, base: Any) -> dict[str, tuple[Tensor, Tensor, float]] | None:
    """The LoRA factors of a run that differs from ``base`` by them and by nothing else; None for any other."""
    import torch

    from gym_fed.delta.factors import lora_factors

    try:
        factors = lora_factors(tuned)
    except GymError:
        return None
    given = base.state_dict()
    frozen = {
        name.replace(".base_layer.", "."): value
        for name, value in tuned.get_base_model().state_dict().items()
        if ".lora_" not in name
    }
    same = frozen.keys() == given.keys() and factors.keys() <= given.keys()
    return factors if same and all(torch.equal(frozen[name], given[name]) for name in given) else None


class Judge:
    """Losses on held-out rows: to choose by, to report, and to forbid.

    Args:
        base: The base, loaded.
        updates: The deltas that a soup is made of.
        heldout: Rows to score soups by; None for none.
        gate: Rows on which no soup may do worse than the base; None for none.
        tolerance: Nats a token that it may.
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
        """For ``MergeMethod.choose``: the negative held-out loss."""
        return -self._loss("heldout", self._updates)(coefficients)

    def veto(self, coefficients: Tensor) -> str | None:
        """For ``MergeMethod.choose``: why such a soup may not be."""
        return self._objection(self._loss("gate", self._updates)(coefficients))

    def verdict(self, soup: DeltaFile) -> dict[str, dict[str, float]]:
        """Losses of base and finished soup, by ``heldout`` and ``gate``.

        Raises:
            GymError: ``UPDATE_REFUSED`` when the gate forbids the soup.
        """
        import torch

        found = {
            key: {"base": self._base_loss[key], "soup": self._loss(key, [soup])(torch.ones(1))}
            for key in self._rows
        }
        objection = self._objection(found["gate"]["soup"]) if "gate" in found else None
        if objection:
            raise GymError(
                ErrorCode.UPDATE_REFUSED,
                f"the soup {objection}",
                "nothing was written; leave out updates, lower scale, or raise --gate-tolerance",
            )
        return found

    def _objection(self, loss: float) -> str | None:
        most = self._base_loss["gate"] + self._tolerance
        if loss <= most:
            return None
        return f"has loss {loss:.4f} on {self._gate_file}, where at most {most:.4f} is allowed"

    def _loss(self, key: str, updates: list[DeltaFile]) -> SoupLoss:
        from gym_fed.evaluation.soup_loss import SoupLoss

        return SoupLoss(self._base.model, self._base.tokenizer, updates, self._rows[key])


@contextmanager
def tensor_bar(total: int, *, shown: bool) -> Iterator[Callable[[str], None]]:
    """A progress bar over tensors, on a terminal; what it gives is called with the name of each that is done."""
    if not (shown and console.err.is_terminal):
        yield lambda _: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        "merging",
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console.err, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda name: bar.update(task, advance=1, description=name)


Write: TypeAlias = "Callable[[DeltaFile, Path, BaseSpec, list[DeltaFile]], None]"
"""Writes the exact soup of some updates as it is to travel."""


@dataclass(frozen=True)
class Opened:
    """What a merge works on.

    Attributes:
        updates: By place in the command.
        weights: Of these updates, in their order.
        inputs: Opens what else is named, and has the base.
        judge: Losses on held-out rows.
    """

    updates: dict[int, DeltaFile]
    weights: list[float]
    inputs: Inputs
    judge: Judge


class Work(ABC):
    """What is left to do once the updates are open; every word of the command was checked before."""

    @abstractmethod
    def run(self, opened: Opened, path: Path, on_tensor: Callable[[str], None]) -> tuple[Any, dict[str, Any]]:
        """Write the exact soup (``compact.EXACT``) to ``path``; gives the report, and what else is worth telling."""


class Aggregation(Work):
    """By a recipe's rules."""

    def __init__(self, values: dict[str, Any], root: str | None) -> None:
        from gym_fed.config.hub.soup import SoupRecipe
        from gym_fed.config.yaml.file import validate
        from gym_fed.soup.compact import EXACT
        from gym_fed.soup.pipeline import Pipeline

        self._recipe: SoupRecipe = validate({**values, "codec": EXACT}, SoupRecipe, "options")
        Pipeline.of(self._recipe)
        self._root = root

    def run(self, opened: Opened, path: Path, on_tensor: Callable[[str], None]) -> tuple[Any, dict[str, Any]]:
        from gym_fed.soup.merging import merge as aggregate

        root = opened.inputs.open(self._root) if self._root is not None else None
        updates, spec = list(opened.updates.values()), opened.inputs.spec
        report = aggregate(updates, opened.weights, self._recipe, path, spec, root=root, on_tensor=on_tensor)
        return report, {}


class Method(Work):
    """By a merge method."""

    def __init__(
        self,
        name: str,
        values: dict[str, Any],
        statistics: list[Path],
        count: int,
        heldout: Path | None,
    ) -> None:
        from gym_fed.evaluation.merge_statistics import StatisticsFile, kind_of
        from gym_fed.kinds import METHODS
        from gym_fed.soup.building import build

        self._method: MergeMethod = build(METHODS.type_of(name), values, "--set")
        wanted = self._method.statistics
        if len(statistics) != (count if wanted else 0):
            raise GymError(
                ErrorCode.USAGE,
                f"merge method {name!r} needs {f'{wanted} of each of {count} updates' if wanted else 'no statistics'}, "
                f"but --statistics is given {len(statistics)} times",
                "make them with gym soup statistics, one for each update"
                if wanted
                else "leave --statistics out",
            )
        if self._method.uses_score and heldout is None:
            raise GymError(
                ErrorCode.USAGE, f"merge method {name!r} chooses by held-out data", "name rows with --heldout"
            )
        self._statistics = [StatisticsFile(path, kind_of(str(wanted))) for path in statistics]

    def run(self, opened: Opened, path: Path, on_tensor: Callable[[str], None]) -> tuple[Any, dict[str, Any]]:
        from gym_fed.delta.base import model_tensors
        from gym_fed.soup.compact import EXACT
        from gym_fed.soup.model_merging import merge_models

        chooses, inputs, judge = self._method.uses_score, opened.inputs, opened.judge
        report = merge_models(
            list(opened.updates.values()),
            opened.weights,
            self._method,
            EXACT,
            path,
            inputs.spec,
            base=model_tensors(inputs.base.model) if self._method.uses_base else None,
            statistics=[self._statistics[index] for index in opened.updates] if self._statistics else (),
            score=judge.score if chooses else None,
            gate=judge.veto if chooses and judge.has_gate else None,
            on_tensor=on_tensor,
        )
        return report, dict(report.found)


def run(
    work: Work,
    names: list[str],
    weights: list[float],
    base: str | None,
    output: Path,
    write: Write,
    judge_of: Callable[[Any, list[DeltaFile]], Judge],
    *,
    skip_broken: bool,
    shown: bool,
) -> dict[str, Any]:
    """Open, merge, encode, judge; the soup takes ``output``'s place last. Gives what the command prints."""
    from gym_fed.delta.file import DeltaFile
    from gym_fed.soup.compact import compared
    from gym_fed.soup.credit.parts import parts

    loaded, spec = base_of(names, base)
    output.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".soup-", dir=output.parent)))
        inputs = Inputs(loaded, spec, folder, stack)
        updates, refused = _open(inputs, names, skip_broken)
        files, heard = list(updates.values()), [weights[index] for index in updates]
        judge = judge_of(loaded, files)
        opened = Opened(updates, heard, inputs, judge)
        merged, soup = folder / "merged.gymdelta", folder / "soup.gymdelta"
        with tensor_bar(len({name for file in files for name in file.names}), shown=shown) as on_tensor:
            report, found = work.run(opened, merged, on_tensor)
        with DeltaFile.open(merged, spec) as exact:
            shares = parts(files, exact)
            write(exact, soup, spec, files)
            with DeltaFile.open(soup, spec) as written:
                told, losses = compared(written, exact), judge.verdict(written)
        os.replace(soup, output)
    clips = getattr(report, "clip_factors", [1.0] * len(files))
    return {
        "file": str(output),
        "base": {"name": spec.model_name, "digest": spec.digest},
        "updates": [
            {"update": names[index], "weight": w, "norm": norm, "clip_factor": clip, "part": share}
            for index, w, norm, clip, share in zip(
                updates, heard, report.update_norms, clips, shares, strict=True
            )
        ],
        "refused": refused,
        "found": found,
        "losses": losses,
        "norm": told.norm,
        "sha256": told.sha256,
        "size_bytes": told.size_bytes,
        "bits_per_weight": told.bits_per_weight,
        "codecs": told.codecs,
        "encoding_error": told.error,
    }


def _open(inputs: Inputs, names: list[str], skip_broken: bool) -> tuple[dict[int, DeltaFile], dict[str, str]]:
    """Open updates by their place; those that cannot be used by name, with the reason."""
    opened: dict[int, DeltaFile] = {}
    refused: dict[str, str] = {}
    for index, name in enumerate(names):
        try:
            opened[index] = inputs.open(name)
        except GymError as error:
            if not skip_broken:
                hint = f"{error.hint}; " if error.hint else ""
                raise GymError(
                    error.code, error.message, f"{hint}or go on without it: --skip-broken"
                ) from error
            refused[name] = error.message
            console.err.print(f"left out: {error.message}")
    if not opened:
        raise GymError(ErrorCode.USAGE, f"none of the {len(names)} updates can be used")
    return opened, refused
