"""A language model under attack: ten contributors train stories260K on Shakespeare, two of them malicious.

Training runs in this process. Updates are written, read and merged as in a real round: ``encode_delta`` writes sign
bits (honest contributors use error feedback) to ``.gymdelta`` files, which ``merge`` reads. The held-out loss is
measured on speakers that nobody trains on.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from _defences import DEFAULT
from _report import Report
from _row_evidence import row_evidence
from _sequences import Delta, encoded, loss_of, speeches, trained

from gym_fed.base.models import load_model
from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.delta.base import BaseSpec, model_tensors
from gym_fed.delta.encode import encode_source
from gym_fed.delta.feedback import ErrorFeedback
from gym_fed.delta.file import DeltaFile, apply_delta
from gym_fed.soup.merging import merge

CONTRIBUTORS, MALICIOUS, HELDOUT = 10, 2, 8
LENGTH, BATCH, LR, LR_DECAY = 128, 16, 2e-3, 0.7
TEST_SEQUENCES = 200
ROOT_SPEAKERS, ROOT_SEQUENCES = 4, 100
"""Number of speakers and sequences in the coordinator's data, none of which are test or training data."""
WITH_ROWS = f"{DEFAULT} with rows"

CODEC = CodecPolicy(codec="bitdelta", group_size="auto", small_tensors="bitdelta", scale_dtype="bfloat16")
SOUP_CODEC = CodecPolicy(codec="dense", dense_dtype="float32", error_feedback=False)


def _none(own: Delta, honest: list[Delta]) -> Delta:
    return own


def _sign_flip(own: Delta, honest: list[Delta]) -> Delta:
    return {name: -tensor for name, tensor in own.items()}


def _inner_product(own: Delta, honest: list[Delta]) -> Delta:
    """Return minus eight times the honest mean, with which two malicious clients in ten reverse the plain mean."""
    return {name: -8.0 * sum(one[name] for one in honest) / len(honest) for name in own}  # type: ignore[misc]


ATTACKS: dict[str, Callable[[Delta, list[Delta]], Delta]] = {
    "none": _none,
    "sign_flip": _sign_flip,
    "inner_product": _inner_product,
}


def measure(report: Report, shared: Path, quick: bool) -> None:
    """Measure the held-out loss with the plain mean and the default rule under each attack."""
    rounds, steps = (1, 5) if quick else (3, 15)
    loaded = load_model(str(shared / "models" / "stories260K"))
    speakers = speeches(shared, CONTRIBUTORS + HELDOUT + ROOT_SPEAKERS)
    texts = [encoded(loaded.tokenizer, rows, LENGTH) for rows in speakers[:CONTRIBUTORS]]
    of_test = [row for rows in speakers[CONTRIBUTORS : CONTRIBUTORS + HELDOUT] for row in rows]
    held = encoded(loaded.tokenizer, of_test, LENGTH)
    held = held[:: -(-len(held) // TEST_SEQUENCES)]
    of_root = [row for rows in speakers[CONTRIBUTORS + HELDOUT :] for row in rows]
    root = encoded(loaded.tokenizer, of_root, LENGTH)[:ROOT_SEQUENCES]
    base = loss_of(loaded.model, held)
    report.figure("heldout_base_nats", base)
    alone = copy.deepcopy(loaded.model)
    for number in range(rounds):
        _add(alone, trained(alone, root, steps, LR * LR_DECAY**number, BATCH, len(texts)))
    report.figure("root_alone_nats", loss_of(alone, held))
    for attack in ATTACKS:
        found = {}
        for rule in ("mean", DEFAULT, WITH_ROWS):
            model = copy.deepcopy(loaded.model)
            with tempfile.TemporaryDirectory(prefix="gym-attacks-") as folder:
                for number in range(rounds):
                    lr = LR * LR_DECAY**number
                    deltas = [trained(model, text, steps, lr, BATCH, seed) for seed, text in enumerate(texts)]
                    rows = root if rule == WITH_ROWS else []
                    own = trained(model, rows, steps, lr, BATCH, len(texts)) if len(rows) else None
                    _merged(model, deltas, rule, attack, Path(folder), number, own, rows)
            found[rule] = loss_of(model, held)
            print(f"{rule} under {attack}: {base:.3f} -> {found[rule]:.3f} nats", file=sys.stderr, flush=True)
        what = f"stories260K, {attack} by {MALICIOUS} of {CONTRIBUTORS}: held-out loss"
        report.compare(what, found[DEFAULT], found["mean"], unit="nats")
        report.compare(f"{what}, with clean rows", found[WITH_ROWS], found["mean"], unit="nats")
        below = f"stories260K under {attack}: held-out loss, against the base's"
        report.aim(below, found[DEFAULT], base)


def _merged(
    model: Any,
    deltas: list[Delta],
    rule: str,
    attack: str,
    folder: Path,
    number: int,
    root: Delta | None,
    rows: Any,
) -> None:
    """Encode all updates, and add their soup to ``model``."""
    honest = deltas[:-MALICIOUS]
    sent = [*honest, *(ATTACKS[attack](own, honest) for own in deltas[-MALICIOUS:])]
    tensors = model_tensors(model)
    spec = BaseSpec.of(tensors, f"stories260K, round {number + 1}")
    with ExitStack() as stack:
        opened = []
        for index, delta in enumerate(sent):
            path = folder / f"{number}-{index}.gymdelta"
            if index < len(honest):
                feedback = ErrorFeedback.load(folder / f"{index}.residual", "stories260K")
                encode_source(delta.__getitem__, CODEC, path, spec, feedback)
                feedback.save()
            else:
                codec = CODEC.model_copy(update={"error_feedback": False})
                encode_source(delta.__getitem__, codec, path, spec)
            opened.append(stack.enter_context(DeltaFile.open(path, spec)))
        malicious = 0 if rule == "mean" else MALICIOUS
        aggregator = rule.removesuffix(" with rows")
        recipe = SoupRecipe(aggregator=aggregator, num_malicious_nodes=malicious, codec=SOUP_CODEC)
        own, evidence = None, None
        if root is not None:
            encode_source(root.__getitem__, SOUP_CODEC, folder / "root.gymdelta", spec)
            own = stack.enter_context(DeltaFile.open(folder / "root.gymdelta", spec))

            def loss(coefficients: list[float]) -> float:
                moved = copy.deepcopy(model)
                for update, coefficient in zip(opened, coefficients, strict=True):
                    if coefficient:
                        apply_delta(moved, update, coefficient)
                return loss_of(moved, rows)

            evidence = row_evidence(opened, recipe, spec, own, loss)
        out = folder / f"{number}-soup.gymdelta"
        merge(opened, [1.0] * len(opened), recipe, out, spec, root=own, evidence=evidence)
        soup = stack.enter_context(DeltaFile.open(folder / f"{number}-soup.gymdelta", spec))
        _add(model, {name: soup.decode(name) for name in soup.names})


def _add(model: Any, delta: Delta) -> None:
    tensors = model_tensors(model)
    for name, change in delta.items():
        tensors[name].add_(change)
