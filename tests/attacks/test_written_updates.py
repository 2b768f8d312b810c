"""Attacks on the digits move sign bits as the package writes them: the experiment is about the real format."""

from __future__ import annotations

from pathlib import Path

import torch
from _defences import DEFAULT, Defence
from _digits import Digits, Perceptron, Schedule

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.writer import DeltaEntry, write_delta
from gym_fed.soup.merging import merge

NETWORK = Perceptron()
SHAPES = NETWORK.shapes
SPEC = BaseSpec.of({name: torch.zeros(shape) for name, shape in SHAPES.items()}, "digits")
EXACT = CodecPolicy(codec="dense", dense_dtype="float32", error_feedback=False)


def files(deltas: torch.Tensor, folder: Path) -> list[DeltaFile]:
    opened = []
    for index, delta in enumerate(deltas):
        tensors = zip(SHAPES, NETWORK.unpacked(delta), strict=True)
        path = folder / f"{index}.gymdelta"
        write_delta(path, [DeltaEntry.of(name, tensor, "bitdelta") for name, tensor in tensors], SPEC)
        opened.append(DeltaFile.open(path, SPEC))
    return opened


def test_the_benchmark_and_a_merge_of_delta_files_make_the_same_soup(tmp_path: Path) -> None:
    data = Digits((0,), 20, 4, "dirichlet")
    deltas = data.train(data.first_model(), Schedule(), range(20), torch.Generator().manual_seed(0))[0]
    updates = files(deltas, tmp_path)
    wanted = NETWORK.signs(deltas)
    for update, one in zip(updates, wanted, strict=True):
        for name, tensor in zip(SHAPES, NETWORK.unpacked(one), strict=True):
            torch.testing.assert_close(update.decode(name), tensor, rtol=1e-5, atol=1e-9)
    recipe = SoupRecipe(aggregator=DEFAULT, num_malicious_nodes=4, codec=EXACT)
    report = merge(updates, [1.0] * 20, recipe, tmp_path / "soup.gymdelta", SPEC)
    soup, coefficients = Defence(DEFAULT, 4).merge(wanted, torch.zeros(NETWORK.dimension))
    assert coefficients is not None
    torch.testing.assert_close(
        torch.tensor(report.coefficients),
        coefficients.to(torch.float64),
        rtol=1e-3,
        atol=1e-5,
        check_dtype=False,
    )
    with DeltaFile.open(tmp_path / "soup.gymdelta", SPEC) as opened:
        for name, tensor in zip(SHAPES, NETWORK.unpacked(soup), strict=True):
            torch.testing.assert_close(opened.decode(name), tensor, rtol=1e-2, atol=1e-5)
    for update in updates:
        update.close()
