"""A language model under attack: ten speakers of Shakespeare teach stories260K, two of them lie.

Training is in this process; updates are written, read and merged as in a real round: sign bits by ``encode_delta`` with
error feedback at the honest, ``.gymdelta`` files, ``merge``. Held-out loss is that of speakers whom nobody trains on.
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
from _sequences import Delta, encoded, loss_of, speeches, trained

from gym_fed.base.models import load_model
from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.delta.base import BaseSpec, model_tensors
from gym_fed.delta.encode import encode_source
from gym_fed.delta.feedback import ErrorFeedback
from gym_fed.delta.file import DeltaFile
from gym_fed.soup.merging import merge

CONTRIBUTORS, MALICIOUS, HELDOUT = 10, 2, 8
LENGTH, BATCH, LR, LR_DECAY = 128, 16, 2e-3, 0.7
TEST_SEQUENCES = 200

CODEC = CodecPolicy(codec="bitdelta", group_size="auto", small_tensors="bitdelta", scale_dtype="bfloat16")
SOUP_CODEC = CodecPolicy(codec="dense", dense_dtype="float32", error_feedback=False)


def _none(own: Delta, honest: list[Delta]) -> Delta:
    return own


def _sign_flip(own: Delta, honest: list[Delta]) -> Delta:
    return {name: -tensor for name, tensor in own.items()}


def _inner_product(own: Delta, honest: list[Delta]) -> Delta:
    """Minus eight times the honest mean: far enough to turn the plain mean of two malicious clients in ten around."""
    return {name: -8.0 * sum(one[name] for one in honest) / len(honest) for name in own}  # type: ignore[misc]


ATTACKS: dict[str, Callable[[Delta, list[Delta]], Delta]] = {
    "none": _none,
    "sign_flip": _sign_flip,
    "inner_product": _inner_product,
}


def measure(report: Report, shared: Path, quick: bool) -> None:
    """Held-out loss by the plain mean and by the default under each attack."""
    rounds, steps = (1, 5) if quick else (3, 15)
    loaded = load_model(str(shared / "models" / "stories260K"))
    speakers = speeches(shared, CONTRIBUTORS + HELDOUT)
    texts = [encoded(loaded.tokenizer, rows, LENGTH) for rows in speakers[:CONTRIBUTORS]]
    held = encoded(loaded.tokenizer, [row for rows in speakers[CONTRIBUTORS:] for row in rows], LENGTH)
    held = held[:: -(-len(held) // TEST_SEQUENCES)]
    base = loss_of(loaded.model, held)
    report.figure("heldout_base_nats", base)
    for attack in ATTACKS:
        found = {}
        for rule in ("mean", DEFAULT):
            model = copy.deepcopy(loaded.model)
            with tempfile.TemporaryDirectory(prefix="gym-attacks-") as folder:
                for number in range(rounds):
                    lr = LR * LR_DECAY**number
                    deltas = [trained(model, text, steps, lr, BATCH, seed) for seed, text in enumerate(texts)]
                    _merged(model, deltas, rule, attack, Path(folder), number)
            found[rule] = loss_of(model, held)
            print(f"{rule} under {attack}: {base:.3f} -> {found[rule]:.3f} nats", file=sys.stderr, flush=True)
        what = f"stories260K, {attack} by {MALICIOUS} of {CONTRIBUTORS}: held-out loss"
        report.compare(what, found[DEFAULT], found["mean"], unit="nats")
        below = f"stories260K under {attack}: held-out loss, against the base's"
        report.aim(below, found[DEFAULT], base)


def _merged(model: Any, deltas: list[Delta], rule: str, attack: str, folder: Path, number: int) -> None:
    """Everybody's file, honest or not, and the soup of all of them added to ``model``."""
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
        recipe = SoupRecipe(aggregator=rule, num_malicious_nodes=malicious, codec=SOUP_CODEC)
        merge(opened, [1.0] * len(opened), recipe, folder / f"{number}-soup.gymdelta", spec)
        soup = stack.enter_context(DeltaFile.open(folder / f"{number}-soup.gymdelta", spec))
        for name in soup.names:
            tensors[name].add_(soup.decode(name))
