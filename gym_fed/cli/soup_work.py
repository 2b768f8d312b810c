"""What `gym soup merge` does once its words are read: open, merge by aggregator or method, judge, put in place."""

from __future__ import annotations

import os
import tempfile
from abc import ABC, abstractmethod
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from gym_fed import console
from gym_fed.cli.soup_base import base_of
from gym_fed.cli.soup_inputs import Inputs, Judge, tensor_bar
from gym_fed.errors import ErrorCode, GymError

if TYPE_CHECKING:
    from collections.abc import Callable

    from gym_fed.config.soup import SoupRecipe
    from gym_fed.delta.base import BaseSpec
    from gym_fed.delta.file import DeltaFile
    from gym_fed.soup.method import MergeMethod


Write: TypeAlias = "Callable[[DeltaFile, Path, BaseSpec, list[DeltaFile]], None]"
"""Writes the exact soup of some updates as it is to travel."""


class Work(ABC):
    """What is left to do once the updates are open; every word of the command was checked before."""

    @abstractmethod
    def run(
        self,
        opened: dict[int, DeltaFile],
        weights: list[float],
        path: Path,
        spec: BaseSpec,
        inputs: Inputs,
        judge: Judge,
        on_tensor: Callable[[str], None],
    ) -> tuple[Any, dict[str, Any]]:
        """Write the exact soup (``compact.EXACT``); ``opened`` is by place in the command. Gives the report, and what
        else is worth telling."""


class Aggregation(Work):
    """By a recipe's rules."""

    def __init__(self, values: dict[str, Any], root: str | None) -> None:
        from gym_fed.config.soup import SoupRecipe
        from gym_fed.config.yaml_file import validate
        from gym_fed.soup.compact import EXACT
        from gym_fed.soup.pipeline import Pipeline

        self._recipe: SoupRecipe = validate({**values, "codec": EXACT}, SoupRecipe, "options")
        Pipeline.of(self._recipe)
        self._root = root

    def run(
        self,
        opened: dict[int, DeltaFile],
        weights: list[float],
        path: Path,
        spec: BaseSpec,
        inputs: Inputs,
        judge: Judge,
        on_tensor: Callable[[str], None],
    ) -> tuple[Any, dict[str, Any]]:
        from gym_fed.soup.merging import merge as aggregate

        root = inputs.open(self._root) if self._root is not None else None
        updates = list(opened.values())
        report = aggregate(updates, weights, self._recipe, path, spec, root=root, on_tensor=on_tensor)
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

    def run(
        self,
        opened: dict[int, DeltaFile],
        weights: list[float],
        path: Path,
        spec: BaseSpec,
        inputs: Inputs,
        judge: Judge,
        on_tensor: Callable[[str], None],
    ) -> tuple[Any, dict[str, Any]]:
        from gym_fed.delta.base import model_tensors
        from gym_fed.soup.compact import EXACT
        from gym_fed.soup.model_merging import merge_models

        chooses = self._method.uses_score
        report = merge_models(
            list(opened.values()),
            weights,
            self._method,
            EXACT,
            path,
            spec,
            base=model_tensors(inputs.base.model) if self._method.uses_base else None,
            statistics=[self._statistics[index] for index in opened] if self._statistics else (),
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
    from gym_fed.soup.parts import parts

    loaded, spec = base_of(names, base)
    output.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".soup-", dir=output.parent)))
        inputs = Inputs(loaded, spec, folder, stack)
        opened, refused = _open(inputs, names, skip_broken)
        files, heard = list(opened.values()), [weights[index] for index in opened]
        judge = judge_of(loaded, files)
        merged, soup = folder / "merged.gymdelta", folder / "soup.gymdelta"
        with tensor_bar(len({name for file in files for name in file.names}), shown=shown) as on_tensor:
            report, found = work.run(opened, heard, merged, spec, inputs, judge, on_tensor)
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
                opened, heard, report.update_norms, clips, shares, strict=True
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
