"""`Evaluator`: exact match and loss on tasks and files of ours; public benchmarks are refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gym_fed.compat.row import RefusedWord
from gym_fed.errors import ErrorCode
from gym_fed.files import write_atomically
from gym_fed.kinds import TASKS

_BENCHMARK = RefusedWord(
    "public benchmarks are not run here, and their rows are not on this machine",
    (
        "gym export MODEL -o model-folder",
        "lm_eval --model hf --model_args pretrained=model-folder --tasks mmlu,hellaswag,winogrande,arc_challenge",
    ),
)
_LEADERBOARD = RefusedWord(
    "there is no leaderboard to submit to",
    ("results = Evaluator(benchmarks=[...], model=model).run()", 'results.save("results.json")'),
)


@dataclass(frozen=True)
class EvalResults:
    """Figures by benchmark.

    Attributes:
        figures: Of each benchmark ``exact_match``, ``loss`` in nats per token, and ``num_examples``.
    """

    figures: Mapping[str, Mapping[str, float]]

    def __getitem__(self, benchmark: str) -> Mapping[str, float]:
        return self.figures[benchmark]

    def save(self, path: str | Path) -> Path:
        """Write the figures as JSON."""
        target = Path(path)
        write_atomically(target, f"{json.dumps(self.figures, indent=2, sort_keys=True)}\n".encode())
        return target


class Evaluator:
    """Measures a model on rows with a right answer.

    Args:
        benchmarks: Names of generated tasks (``gym data tasks`` lists them), of which held-out rows are asked, or files
            of conversations.
        model: A name or folder as for ``load_model``, or the result of ``Trainer.train``.
        num_examples: Rows of each benchmark.

    Raises:
        GymError: ``UNAVAILABLE`` for a public benchmark, with the lines that run it elsewhere.
    """

    def __init__(self, benchmarks: Sequence[str], model: Any, *, num_examples: int = 100) -> None:
        for name in benchmarks:
            if name not in TASKS and not Path(name).is_file():
                raise _BENCHMARK.error(f"benchmark {name!r}", code=ErrorCode.UNAVAILABLE)
        self.benchmarks, self.num_examples = list(benchmarks), num_examples
        self._model = model

    def run(self) -> EvalResults:
        """Ask every row once, decoding greedily.

        Raises:
            GymError: See ``load_model`` and ``load_rows``.
        """
        from gym_fed.evaluation.generation import exact_match
        from gym_fed.evaluation.loss import heldout_loss
        from gym_fed.models import load_model

        loaded = load_model(str(self._model)) if isinstance(self._model, str | Path) else self._model
        figures: dict[str, dict[str, float]] = {}
        for name in self.benchmarks:
            rows = self._rows(name)
            figures[name] = {
                "exact_match": exact_match(loaded.model, loaded.tokenizer, rows),
                "loss": heldout_loss(loaded.model, loaded.tokenizer, rows),
                "num_examples": len(rows),
            }
        return EvalResults(figures)

    def submit_to_leaderboard(self, *, model_name: str, organization: str) -> None:
        """Refused.

        Raises:
            GymError: ``UNAVAILABLE``, with the lines that keep the figures.
        """
        raise _LEADERBOARD.error(f"{organization}/{model_name}", code=ErrorCode.UNAVAILABLE)

    def _rows(self, name: str) -> list[dict[str, Any]]:
        from gym_fed.data.generated import generate
        from gym_fed.data.reading import load_rows

        if name in TASKS:
            return generate(name, self.num_examples, split="heldout")
        return list(load_rows(name))[: self.num_examples]
