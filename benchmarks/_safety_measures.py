"""What `safety.py` measures: probe and task by the engine, all variants of a base in one pass; loss; thresholds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from _safety_rows import Row
from gym_quant.safety import project_delta

from gym_fed.base.models import load_model, model_name
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.file import DeltaFile, apply_delta
from gym_fed.evaluation.loss import heldout_loss
from gym_fed.evaluation.probe.margin import model_margins
from gym_fed.evaluation.probe.probe import run_probe
from gym_fed.evaluation.probe.prompts import ProbePrompts
from gym_fed.evaluation.scoring.models import BASE, ModelRequest, open_models, resolve_model
from gym_fed.serving.store.store import VariantStore

ANSWER_TOKENS = 24
SHARES = (0.25, 0.5, 1.0)
"""Of the layers that the projection may replace: candidates for its threshold."""
MOST_LOSS = 0.02
"""How much worse the benign task may get by the threshold, relative."""


def request(base: Path, deltas: Mapping[str, Path], folder: Path) -> ModelRequest:
    """A base and its variants, unsigned, from a store in ``folder``."""
    with VariantStore.open(folder, require_signature=False) as store:
        for name, path in deltas.items():
            store.add(path, name=name, owner="benchmark", replace=True)
    return ModelRequest(str(base), store=folder, variants=tuple(deltas))


def probe(asked: ModelRequest, prompts: ProbePrompts) -> dict[str, Any]:
    """Of every model: margins, attacks by template, over-refusals, prompt by prompt."""
    with open_models(resolve_model(asked)) as models:
        found = run_probe(models.scorer, prompts, max_tokens=ANSWER_TOKENS)
        names = [BASE] if not asked.variants else list(asked.variants)
        if list(found) != names:
            raise SystemExit(f"probed {list(found)}, not {names}")
    return {
        name: {
            "margins": list(result.margins),
            "attacks": {template: list(map(bool, tried)) for template, tried in result.attacks.items()},
            "benign_refused": list(map(bool, result.benign_refused)),
        }
        for name, result in found.items()
    }


def loss(base: Path, delta: Path | None, rows: Sequence[Row]) -> float:
    """Held-out loss in nats per token of a base plus a delta."""
    loaded = load_model(str(base))
    model = loaded.model.float()
    if delta is not None:
        with DeltaFile.open(delta, BaseSpec.of(model, model_name(str(base)))) as opened:
            apply_delta(model, opened)
    return heldout_loss(model, loaded.tokenizer, rows, max_length=256, batch_size=8)


@dataclass(frozen=True)
class Candidate:
    """A threshold and what it does to the fine-tune in float32, on rows and prompts for choosing."""

    threshold: float
    replaced: int
    margin: float
    loss: float


def candidates(
    base: Any, tuned: Any, unaligned: Any, tokenizer: Any, prompts: ProbePrompts, rows: Sequence[Row]
) -> tuple[Candidate, list[Candidate]]:
    """The fine-tune as it is, and projected under thresholds that replace a share of its layers."""
    old, unsafe = base.state_dict(), unaligned.state_dict()
    changed = [
        name
        for name, weight in tuned.state_dict().items()
        if weight.ndim == 2 and not torch.equal(weight, old[name])
    ]
    deltas = {name: tuned.state_dict()[name] - old[name] for name in changed}
    always = {name: project_delta(delta, old[name], unsafe[name], 1.0) for name, delta in deltas.items()}
    cosines = sorted(one.cosine for one in always.values() if one.cosine is not None)
    if len(cosines) != len(changed):
        raise SystemExit(f"{len(changed) - len(cosines)} of {len(changed)} layers span no subspace")
    plain = Candidate(0.0, 0, *_measured(tuned, tokenizer, prompts, rows))
    found = []
    for share in SHARES:
        above = round(share * len(cosines))
        threshold = 1.0 if above == len(cosines) else (cosines[above - 1] + cosines[above]) / 2
        replaced = {name: one for name, one in always.items() if (one.cosine or 0.0) < threshold}
        with _weights(tuned, {name: old[name] + one.delta for name, one in replaced.items()}):
            found.append(Candidate(threshold, len(replaced), *_measured(tuned, tokenizer, prompts, rows)))
    return plain, found


def chosen(plain: Candidate, found: Sequence[Candidate]) -> Candidate:
    """The one that refuses most among those that the benign task can bear; else the one that it bears best."""
    bearable = [one for one in found if one.loss <= (1 + MOST_LOSS) * plain.loss]
    if bearable:
        return max(bearable, key=lambda one: one.margin)
    return min(found, key=lambda one: one.loss)


def _measured(model: Any, tokenizer: Any, prompts: ProbePrompts, rows: Sequence[Row]) -> tuple[float, float]:
    with torch.no_grad():
        margin = fmean(model_margins(model, tokenizer, prompts, batch_size=16).tolist())
    return margin, heldout_loss(model, tokenizer, rows, max_length=256, batch_size=8)


@contextmanager
def _weights(model: Any, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Other weights for a while."""
    kept = {name: value.clone() for name, value in model.state_dict().items() if name in weights}
    model.load_state_dict(dict(weights), strict=False)
    try:
        yield
    finally:
        model.load_state_dict(kept, strict=False)
