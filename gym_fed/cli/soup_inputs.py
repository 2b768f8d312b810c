"""What `gym soup merge` works on: files opened, fine-tunes turned into deltas, soups judged on held-out rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed import console
from gym_fed.errors import ErrorCode, GymError

if TYPE_CHECKING:
    from torch import Tensor

    from gym_fed.delta.base import BaseSpec
    from gym_fed.delta.file import DeltaFile
    from gym_fed.evaluation.soup_loss import SoupLoss
    from gym_fed.models import LoadedModel


class Inputs:
    """Opens updates of one base; files made on the way lie in ``folder``."""

    def __init__(self, base: LoadedModel, spec: BaseSpec, folder: Path, stack: ExitStack) -> None:
        self.base = base
        self._spec, self._folder, self._stack = spec, folder, stack
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
        return self._stack.enter_context(DeltaFile.open(path, self._spec))

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
                lora_delta(factors, path, self._spec, policy=policy)
                return path
            tuned = tuned.merge_and_unload()
        exact = CodecPolicy(codec="dense", dense_dtype="float32", error_feedback=False)
        encode_delta(tuned, self.base.model, exact, path, self._spec)
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
