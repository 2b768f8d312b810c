"""Measure the share of fp32 FedAvg's gain that the network's rounds keep, on three sets of speakers and three seeds.

Every cell is one run of one side. It is stored as a line of JSON in ``--cells FILE`` and is not run again.

The 48 most prolific speakers are ordered by the sha256 of their names. The first 16 are the set on which settings are
chosen, and the next two groups of 16 are reported. The third reported set is the first 16 of the other speakers in the
same order, who have less text: 2 to 7 thousand characters each. The first eight speakers of a set train. The loss is
measured on the other eight, on the first four thousand characters of each.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from _federated_rounds import (
    Contributors,
    Course,
    Schedule,
    require_like_trainer,
    rounds_by_codec,
    rounds_in_fp32,
)
from _report import Report, kept

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.config.hub.task import TrainingRecipe

PROLIFIC = 48
TRAINED, HELDOUT = 8, 8
HELDOUT_CHARACTERS = 4000
"""Maximum number of characters of a held-out speaker, so that all have about the same weight."""


@dataclass(frozen=True)
class SpeakerSet:
    """The speeches of the speakers who train and of the held-out speakers."""

    name: str
    contributors: dict[str, list[str]]
    heldout: dict[str, list[str]]

    def write(self, folder: Path) -> None:
        """Write ``speaker0.jsonl`` and so on, and ``heldout.jsonl``."""
        folder.mkdir(parents=True, exist_ok=True)
        for index, speeches in enumerate(self.contributors.values()):
            (folder / f"speaker{index}.jsonl").write_text(_rows(speeches))
        (folder / "heldout.jsonl").write_text("".join(_rows(speeches) for speeches in self.heldout.values()))


def speaker_sets(file: Path) -> dict[str, SpeakerSet]:
    """Return the set ``choice`` and the reported sets ``first``, ``second`` and ``less text``."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    speeches = {str(line["speaker"]): list(line["speeches"]) for line in lines}
    names = list(speeches)
    prolific, others = sorted(names[:PROLIFIC], key=_order), sorted(names[PROLIFIC:], key=_order)
    size = TRAINED + HELDOUT
    members = {
        "choice": prolific[:size],
        "first": prolific[size : 2 * size],
        "second": prolific[2 * size : 3 * size],
        "less text": others[:size],
    }
    assert len({name for chosen in members.values() for name in chosen}) == size * len(members)
    return {
        name: SpeakerSet(
            name,
            {who: speeches[who] for who in chosen[:TRAINED]},
            {who: _first(speeches[who]) for who in chosen[TRAINED:]},
        )
        for name, chosen in members.items()
    }


def _first(speeches: list[str]) -> list[str]:
    """Return entire speeches until there are enough characters."""
    ends = accumulate(len(text) for text in speeches)
    return [text for text, end in zip(speeches, ends, strict=True) if end - len(text) < HELDOUT_CHARACTERS]


def _order(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8")).hexdigest()


def _rows(speeches: list[str]) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in speeches)


@dataclass(frozen=True)
class Side:
    """The settings of one side's rounds; ``codec`` is None for FedAvg in fp32."""

    schedule: Schedule
    codec: CodecPolicy | None
    soup: SoupRecipe

    def key(self) -> dict[str, Any]:
        """Return the settings that identify a cell of this side."""
        return {
            "schedule": asdict(self.schedule),
            "codec": self.codec and self.codec.model_dump(mode="json"),
            "soup": self.soup.model_dump(mode="json"),
        }

    def run(self, group: Contributors, recipe: TrainingRecipe) -> Course:
        if self.codec is None:
            return rounds_in_fp32(group, recipe, self.schedule)
        return rounds_by_codec(group, recipe, self.schedule, self.codec, self.soup)


@dataclass
class Cells:
    """A cache of finished runs, which runs the missing ones."""

    file: Path | None
    model: Path
    folder: Path
    recipe: TrainingRecipe

    def __post_init__(self) -> None:
        self._groups: dict[str, Contributors] = {}

    def course(self, speakers: SpeakerSet, seed: int, side: Side) -> Course:
        """Return a run from the file, or run it and add it to the file."""
        recipe = self.recipe.model_copy(update={"seed": seed})
        key = {"set": speakers.name, "recipe": recipe.model_dump(mode="json"), **side.key()}
        found = kept(self.file, key, lambda: asdict(side.run(self._group(speakers), recipe)))
        print(f"{speakers.name}, seed {seed}: {found['losses'][-1]:.4f}", file=sys.stderr, flush=True)
        return Course(**found)

    def _group(self, speakers: SpeakerSet) -> Contributors:
        """Load a set of speakers once, and check that they train like the network's contributors."""
        if speakers.name not in self._groups:
            folder = self.folder / speakers.name.replace(" ", "-")
            group = contributors(speakers, folder, self.model, self.recipe.max_length)
            if not self._groups:
                require_like_trainer(group, self.recipe)
            self._groups[speakers.name] = group
        return self._groups[speakers.name]


def contributors(speakers: SpeakerSet, folder: Path, model: Path, max_length: int) -> Contributors:
    """Return a set of speakers as contributors, reading files in ``folder``."""
    speakers.write(folder)
    files = [folder / f"speaker{index}.jsonl" for index in range(len(speakers.contributors))]
    return Contributors.load(model, files, folder / "heldout.jsonl", max_length)


def learning(
    result: Report, cells: Cells, sets: Iterable[SpeakerSet], seeds: Iterable[int], ours: Side, theirs: Side
) -> None:
    """Run the missing sets and seeds, and report rows, shares, their spread and the aims."""
    at_end: list[float] = []
    at_best: list[float] = []
    sent: list[float] = []
    fp32_bytes = 0.0
    seeds = list(seeds)
    for speakers in sets:
        for seed in seeds:
            peer, own = (cells.course(speakers, seed, side) for side in (theirs, ours))
            what = f"{speakers.name}, seed {seed}"
            result.compare(f"{what}, last round", own.losses[-1], peer.losses[-1], unit="nats")
            at_end.append(own.gain() / peer.gain())
            at_best.append(own.best_gain() / peer.best_gain())
            sent += own.up_bytes
            fp32_bytes = peer.up_bytes[0]
            result.figure(f"share_{what}_last_round", at_end[-1])
            result.figure(f"share_{what}_best_round", at_best[-1])
    for name, shares in (("last round", at_end), ("best round", at_best)):
        for kind, value in (("mean", statistics.mean(shares)), ("least", min(shares)), ("most", max(shares))):
            result.compare(f"{kind} share of the fp32 gain, {name}", value, better="higher")
    result.compare("bytes up per contributor and round", statistics.mean(sent), fp32_bytes, unit="B")
    result.compare("most bytes up of a round", max(sent), fp32_bytes, unit="B")
    result.aim("least share of the fp32 gain, last round", min(at_end), 0.98, better="higher")
    result.aim("least share of the fp32 gain, best round", min(at_best), 0.98, better="higher")
    of_bf16 = statistics.mean(sent) / (fp32_bytes / 2)
    result.aim("bytes up against bf16", of_bf16, 1 / 16)


def soups(
    result: Report, cells: Cells, sets: Iterable[SpeakerSet], seeds: Iterable[int], ours: Side, theirs: Side
) -> None:
    """Compare additive soups with bfloat16 soups: share of the gain, and bytes downloaded per byte uploaded."""
    shares, ratios, peers, sums = [], [], [], []
    seeds = list(seeds)
    for speakers in sets:
        for seed in seeds:
            peer, own = (cells.course(speakers, seed, side) for side in (theirs, ours))
            result.compare(f"{speakers.name}, seed {seed}", own.losses[-1], peer.losses[-1], unit="nats")
            shares.append(own.gain() / peer.gain())
            ratios.append(sum(own.down_bytes) / sum(own.up_bytes))
            peers.append(sum(peer.down_bytes) / sum(peer.up_bytes))
            sums.append((own.sum_bytes or 0) / statistics.mean(own.down_bytes))
            result.figure(f"share_{speakers.name}_seed_{seed}", shares[-1])
    for kind, value in (("mean", statistics.mean(shares)), ("least", min(shares)), ("most", max(shares))):
        result.compare(f"{kind} share of the gain", value, better="higher")
    result.compare("bytes down per byte up", statistics.mean(ratios), statistics.mean(peers))
    result.compare("all rounds combined, in soups", statistics.mean(sums))
    result.aim("most bytes down per byte up", max(ratios), 1.7)
    result.aim("mean share of the gain", statistics.mean(shares), 0.995, better="higher")
    result.aim("all rounds combined, in soups, most", max(sums), 2.0)


def one_thread() -> None:
    """Use one thread here and in the network's processes, so that float32 sums have the same order."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
