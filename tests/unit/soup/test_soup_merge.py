"""Merging: clipped, weighted, block by block, the same bytes every time, and never mixed with another base."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.feedback import ErrorFeedback
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.writer import DeltaEntry, write_delta
from gym_fed.soup import stacks as decoded_stack
from gym_fed.soup.merging import merge

SHAPES = {"layers.0.down": (16, 172), "layers.1.down": (16, 172), "norm": (16,), "embed": (4, 8, 5)}
SPEC = BaseSpec.of({name: torch.zeros(shape) for name, shape in SHAPES.items()}, "tiny")
EXACT = CodecPolicy(codec="dense", dense_dtype="float32", error_feedback=False)
CODECS = [("bitdelta", {}), ("dense", {}), ("lora", {"rank": 2}), ("bitdelta", {"group_size": 64})]


def noise(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.01 * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.fixture
def updates(tmp_path: Path) -> Iterator[list[DeltaFile]]:
    """Five updates in four codecs; the last leaves a tensor out."""
    with ExitStack() as stack:
        opened = []
        for seed in range(5):
            codec, params = CODECS[seed % 4]
            entries = [
                DeltaEntry.of(
                    name, delta, "dense" if name == "norm" else codec, **({} if name == "norm" else params)
                )
                for name, delta in noise(seed).items()
                if (seed, name) != (4, "layers.1.down")
            ]
            write_delta(tmp_path / f"{seed}.gymdelta", entries, SPEC)
            opened.append(stack.enter_context(DeltaFile.open(tmp_path / f"{seed}.gymdelta", SPEC)))
        yield opened


def decoded(updates: list[DeltaFile], name: str) -> torch.Tensor:
    zero = torch.zeros(SHAPES[name])
    return torch.stack([update.decode(name) if name in update else zero for update in updates])


def merged(
    updates: list[DeltaFile], weights: list[float], recipe: SoupRecipe, path: Path
) -> dict[str, torch.Tensor]:
    merge(updates, weights, recipe, path, SPEC)
    with DeltaFile.open(path, SPEC) as soup:
        return {name: soup.decode(name) for name in soup.names}


def test_the_mean_is_the_weighted_mean_of_what_the_updates_decode_to(
    updates: list[DeltaFile], tmp_path: Path
) -> None:
    weights = [1.0, 2.0, 3.0, 4.0, 5.0]
    recipe = SoupRecipe(aggregator="weighted_mean", codec=EXACT)
    soup = merged(updates, weights, recipe, tmp_path / "soup.gymdelta")
    share = torch.tensor(weights) / 15
    for name in SHAPES:
        wanted = torch.einsum("n,n...->...", share, decoded(updates, name))
        torch.testing.assert_close(soup[name], wanted, rtol=1e-5, atol=1e-9)


def test_the_median_is_taken_coordinate_by_coordinate_and_a_missing_tensor_is_zero(
    updates: list[DeltaFile], tmp_path: Path
) -> None:
    recipe = SoupRecipe(aggregator="median", num_malicious_nodes=2, codec=EXACT)
    soup = merged(updates, [1.0] * 5, recipe, tmp_path / "soup.gymdelta")
    for name in SHAPES:
        torch.testing.assert_close(soup[name], decoded(updates, name).median(dim=0).values)


def test_the_trimmed_mean_leaves_out_the_ends(updates: list[DeltaFile], tmp_path: Path) -> None:
    recipe = SoupRecipe(aggregator="trimmed_mean", num_malicious_nodes=1, codec=EXACT)
    soup = merged(updates, [1.0] * 5, recipe, tmp_path / "soup.gymdelta")
    for name in SHAPES:
        wanted = decoded(updates, name).sort(dim=0).values[1:-1].mean(dim=0)
        torch.testing.assert_close(soup[name], wanted, rtol=1e-5, atol=1e-9)


def test_updates_over_the_norm_are_scaled_down_to_it(updates: list[DeltaFile], tmp_path: Path) -> None:
    cap = sorted(update.norm() for update in updates)[2]
    recipe = SoupRecipe(max_norm=cap, codec=EXACT)
    report = merge(updates, [1.0] * 5, recipe, tmp_path / "soup.gymdelta", SPEC)
    for norm, factor in zip(report.update_norms, report.clip_factors, strict=True):
        assert factor == (1.0 if norm <= cap else pytest.approx(cap / norm))
    assert sum(factor < 1.0 for factor in report.clip_factors) == 2
    with DeltaFile.open(tmp_path / "soup.gymdelta", SPEC) as soup:
        factors = torch.tensor(report.clip_factors)[:, None, None]
        wanted = (decoded(updates, "layers.0.down") * factors).mean(dim=0)
        torch.testing.assert_close(soup.decode("layers.0.down"), wanted, rtol=1e-5, atol=1e-9)
        assert soup.norm() == pytest.approx(report.norm)


def test_the_servers_learning_rate_multiplies_the_soup(updates: list[DeltaFile], tmp_path: Path) -> None:
    once = merged(updates, [1.0] * 5, SoupRecipe(codec=EXACT), tmp_path / "1.gymdelta")
    twice = merged(
        updates, [1.0] * 5, SoupRecipe(codec=EXACT, server_learning_rate=2.0), tmp_path / "2.gymdelta"
    )
    assert all(torch.equal(twice[name], 2 * once[name]) for name in SHAPES)


@pytest.mark.parametrize("aggregator", ["weighted_mean", "median", "trimmed_mean"])
@pytest.mark.parametrize("policy", [EXACT, CodecPolicy(error_feedback=False)], ids=["dense", "bitdelta"])
def test_the_same_updates_give_the_same_bytes_on_any_threads_and_in_any_blocks(
    aggregator: str,
    policy: CodecPolicy,
    updates: list[DeltaFile],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = SoupRecipe(aggregator=aggregator, max_norm=0.5, codec=policy)
    before, digests = torch.get_num_threads(), set()
    try:
        for threads, block in ((1, 1 << 20), (2, 1 << 20), (2, 5000), (1, 1)):
            torch.set_num_threads(threads)
            monkeypatch.setattr(decoded_stack, "BLOCK_ELEMENTS", block)
            digests.add(
                merge(updates, [1.0, 2.0, 1.0, 0.3, 1.0], recipe, tmp_path / "soup.gymdelta", SPEC).sha256
            )
    finally:
        torch.set_num_threads(before)
    assert len(digests) == 1


@pytest.mark.parametrize("aggregator", ["byzantine_robust", "geometric_median", "bulyan"])
def test_rules_that_look_at_inner_products_give_the_same_bytes_on_any_threads(
    aggregator: str, updates: list[DeltaFile], tmp_path: Path
) -> None:
    recipe = SoupRecipe(aggregator=aggregator, pre_aggregators=["nnm"], codec=EXACT)
    before, digests = torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            digests.add(merge(updates, [1.0] * 5, recipe, tmp_path / "soup.gymdelta", SPEC).sha256)
    finally:
        torch.set_num_threads(before)
    assert len(digests) == 1


def test_what_one_bit_loses_of_a_soup_is_in_the_servers_residual(
    updates: list[DeltaFile], tmp_path: Path
) -> None:
    exact = merged(updates, [1.0] * 5, SoupRecipe(codec=EXACT), tmp_path / "exact.gymdelta")
    recipe = SoupRecipe(codec=CodecPolicy(max_bits_per_weight=2.0, small_tensors="bitdelta"))
    sent = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for _ in range(4):
        residual = ErrorFeedback.load(tmp_path / "server.residual", SPEC.digest)
        report = merge(updates, [1.0] * 5, recipe, tmp_path / "soup.gymdelta", SPEC, residual)
        residual.save()
        assert report.size_bytes <= SPEC.num_parameters * 2 / 8
        with DeltaFile.open(tmp_path / "soup.gymdelta", SPEC) as soup:
            for name in soup.names:
                sent[name] += soup.decode(name)
    for name in SHAPES:
        held = residual.residual(name)
        total = sent[name] if held is None else sent[name] + held
        torch.testing.assert_close(total, 4 * exact[name], rtol=0, atol=1e-5)


def test_an_update_of_another_base_is_refused(updates: list[DeltaFile], tmp_path: Path) -> None:
    other = BaseSpec("other", "sha256:" + "1" * 64, dict(SHAPES))
    write_delta(tmp_path / "other.gymdelta", [DeltaEntry.of("norm", noise(0)["norm"])], other)
    with (
        DeltaFile.open(tmp_path / "other.gymdelta") as stranger,
        pytest.raises(GymError, match="other") as e,
    ):
        merge([*updates, stranger], [1.0] * 6, SoupRecipe(codec=EXACT), tmp_path / "soup.gymdelta", SPEC)
    assert e.value.code is ErrorCode.BASE_MISMATCH
    assert not (tmp_path / "soup.gymdelta").exists()


def test_a_round_with_too_few_updates_for_its_malicious_clients_is_refused(
    updates: list[DeltaFile], tmp_path: Path
) -> None:
    recipe = SoupRecipe(aggregator="median", num_malicious_nodes=2, codec=EXACT)
    with pytest.raises(GymError, match=r"4 updates are too few .* needs 5") as caught:
        merge(updates[:4], [1.0] * 4, recipe, tmp_path / "soup.gymdelta", SPEC)
    assert caught.value.code is ErrorCode.CONFIG_INVALID


def test_no_updates_at_all_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GymError) as caught:
        merge([], [], SoupRecipe(codec=EXACT), tmp_path / "soup.gymdelta", SPEC)
    assert caught.value.code is ErrorCode.USAGE


def test_weights_must_be_as_many_as_updates(updates: list[DeltaFile], tmp_path: Path) -> None:
    with pytest.raises(GymError, match="5 updates but 4 weights"):
        merge(updates, [1.0] * 4, SoupRecipe(codec=EXACT), tmp_path / "soup.gymdelta", SPEC)


def test_an_aggregate_that_overflows_is_refused_with_the_tensor(
    updates: list[DeltaFile], tmp_path: Path
) -> None:
    recipe = SoupRecipe(server_learning_rate=1e40, codec=EXACT)
    with pytest.raises(GymError, match="tensor 'embed': the aggregate overflows float32") as caught:
        merge(updates, [1.0] * 5, recipe, tmp_path / "soup.gymdelta", SPEC)
    assert caught.value.code is ErrorCode.UPDATE_REFUSED


_MEMORY = """
import resource, sys, torch
from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.writer import DeltaEntry, write_delta
from gym_fed.soup.merging import merge
folder, spec = sys.argv[1], BaseSpec("big", "sha256:" + "0" * 64, {"w": (1024, 2048)})
for index in range(8):
    delta = torch.randn(1024, 2048, generator=torch.Generator().manual_seed(index))
    write_delta(f"{folder}/{index}", [DeltaEntry.of("w", delta)], spec)
files = [DeltaFile.open(f"{folder}/{index}", spec) for index in range(8)]
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
recipe = SoupRecipe(codec=CodecPolicy(error_feedback=False))
merge(files[:2], [1.0] * 2, recipe, f"{folder}/soup", spec)
before = peak()
merge(files, [1.0] * 8, recipe, f"{folder}/soup", spec)
print(peak() - before)
"""


@pytest.mark.slow  # two processes that merge large files
def test_eight_contributors_take_no_more_memory_than_two(tmp_path: Path) -> None:
    """Decoded, the six more are 48 MiB."""
    run = subprocess.run(
        [sys.executable, "-c", _MEMORY, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert int(run.stdout) < 24, f"grew by {run.stdout.strip()} MiB"
