"""A round's tensors as packed signs, as factors and decoded: the same soup, and nothing decoded without need."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gym_quant.codec import Payload
from gym_quant.codecs.lora import Lora

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.writer import DeltaEntry, write_delta
from gym_fed.soup import signs
from gym_fed.soup import stacks as decoded
from gym_fed.soup.merging import inner_products, merge
from gym_fed.soup.stacks import DecodedStack, FactorStack, SignStack, stack_of, stacks_of

SHAPES = {"down": (48, 172), "up": (33, 7), "norm": (16,)}
SPEC = BaseSpec.of({name: torch.zeros(shape) for name, shape in SHAPES.items()}, "tiny")
EXACT = CodecPolicy(codec="dense", dense_dtype="float32", error_feedback=False)
ROBUST = {"num_malicious_nodes": 2, "pre_aggregators": ["norm_cap", "nnm"]}


def deltas(seed: int, common: float = 0.5) -> dict[str, torch.Tensor]:
    """Updates that agree in part, of different sizes."""
    shared, own = (torch.Generator().manual_seed(s) for s in (0, seed + 1))
    return {
        name: (1 + seed / 5)
        * 0.01
        * (common * torch.randn(shape, generator=shared) + torch.randn(shape, generator=own))
        for name, shape in SHAPES.items()
    }


@contextlib.contextmanager
def written(folder: Path, codecs: Sequence[tuple[str, dict[str, Any]]]) -> Iterator[list[DeltaFile]]:
    """One open update for each ``(codec of matrices, its parameters)``."""
    with contextlib.ExitStack() as stack:
        opened = []
        for index, (codec, params) in enumerate(codecs):
            entries = [
                DeltaEntry.of(name, delta, codec, **params)
                if delta.dim() == 2
                else DeltaEntry.of(name, delta, "dense", dtype="float32")
                for name, delta in deltas(index).items()
            ]
            path = folder / f"{index}.gymdelta"
            write_delta(path, entries, SPEC)
            opened.append(stack.enter_context(DeltaFile.open(path, SPEC)))
        yield opened


def decoded_soup(updates: list[DeltaFile], folder: Path, recipe: SoupRecipe) -> dict[str, torch.Tensor]:
    """The same merge with every tensor decoded first."""
    as_floats = []
    with contextlib.ExitStack() as stack:
        for index, update in enumerate(updates):
            path = folder / f"floats-{index}.gymdelta"
            entries = [DeltaEntry.of(n, update.decode(n), "dense", dtype="float32") for n in update.names]
            write_delta(path, entries, SPEC)
            as_floats.append(stack.enter_context(DeltaFile.open(path, SPEC)))
        return soup(as_floats, folder / "floats-soup.gymdelta", recipe)


def soup(updates: list[DeltaFile], path: Path, recipe: SoupRecipe) -> dict[str, torch.Tensor]:
    merge(updates, [1.0] * len(updates), recipe, path, SPEC)
    with DeltaFile.open(path, SPEC) as found:
        return {name: found.decode(name) for name in found.names}


def recipe(**changes: Any) -> SoupRecipe:
    return SoupRecipe(codec=EXACT, **changes)


SIGNS = [("bitdelta", {})] * 9
ROW_SIGNS = [("bitdelta", {"group_size": 172})] * 9
BINARY = [("binary", {})] * 9
TWO_NAMES = [SIGNS[0], BINARY[0]] * 5
LEVELS = [("ternary", {"group_size": 172}), ("int2", {"symmetric": False}), ("int8", {"group_size": 64})] * 3
FACTORS = [("lora", {"rank": 1 + i % 4}) for i in range(9)]
MIXED = [SIGNS[0], ROW_SIGNS[0], FACTORS[1], ("dense", {}), ("int4", {})] * 2


@pytest.mark.few(18, "codecs, rules and steps are independent")
@pytest.mark.parametrize(
    "rule", ["mean", "multi_krum", "geometric_median", "median", "trimmed_mean", "majority_vote"]
)
@pytest.mark.parametrize(
    "codecs",
    [SIGNS, ROW_SIGNS, BINARY, TWO_NAMES, LEVELS, FACTORS, MIXED],
    ids=["signs", "rows", "binary", "two names", "levels", "factors", "mixed"],
)
@pytest.mark.parametrize("steps", [{}, ROBUST], ids=["plain", "mixed first"])
def test_whatever_the_codec_the_soup_is_that_of_the_decoded_updates(
    tmp_path: Path, codecs: list[tuple[str, dict[str, Any]]], rule: str, steps: dict[str, Any]
) -> None:
    wanted = recipe(
        aggregator=rule, **(steps if rule != "mean" else {k: v for k, v in steps.items() if k[0] == "p"})
    )
    with written(tmp_path, codecs) as updates:
        found = soup(updates, tmp_path / "soup.gymdelta", wanted)
        expected = decoded_soup(updates, tmp_path, wanted)
        largest = max(float(update.decode("down").abs().max()) for update in updates)
    for name in SHAPES:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=2e-4 * largest)


@pytest.mark.parametrize(
    "rule", ["mean", "multi_krum", "median", "trimmed_mean", "majority_vote", "byzantine_robust"]
)
@pytest.mark.parametrize("codecs", [SIGNS, BINARY, TWO_NAMES[:9]], ids=["bitdelta", "binary", "two names"])
def test_sign_deltas_with_one_scale_are_merged_without_decoding_them(
    tmp_path: Path, rule: str, codecs: list[tuple[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def decoded(*_: object) -> None:
        raise AssertionError("decoded")

    with written(tmp_path, codecs) as updates:
        for update in updates:
            monkeypatch.setattr(update, "decode", decoded)
            update_rows = update.decode_rows
            monkeypatch.setattr(
                update, "decode_rows", lambda n, a, b, r=update_rows: r(n, a, b) if n == "norm" else decoded()
            )
        merge(
            updates, [1.0] * 9, recipe(aggregator=rule, num_malicious_nodes=0), tmp_path / "s.gymdelta", SPEC
        )


@pytest.mark.parametrize(
    "codecs", [SIGNS, ROW_SIGNS, FACTORS, MIXED], ids=["signs", "rows", "factors", "mixed"]
)
def test_inner_products_are_those_of_the_decoded_updates(
    tmp_path: Path, codecs: list[tuple[str, dict[str, Any]]]
) -> None:
    with written(tmp_path, codecs) as updates:
        norms = [update.norm() for update in updates]
        found = inner_products(stacks_of(updates, SPEC), norms).numpy()
        rows = np.stack(
            [np.concatenate([u.decode(n).double().numpy().reshape(-1) for n in SHAPES]) for u in updates]
        )
    np.testing.assert_allclose(found, rows @ rows.T, rtol=0, atol=2e-6 * max(norms) ** 2)


def test_what_a_malicious_client_sends_does_not_spoil_the_products_of_the_honest(tmp_path: Path) -> None:
    with written(tmp_path, [("dense", {"dtype": "float32"})] * 4) as updates:
        entries = [DeltaEntry.of(n, torch.full(s, 1e30), "dense", dtype="float32") for n, s in SHAPES.items()]
        write_delta(tmp_path / "malicious.gymdelta", entries, SPEC)
        with DeltaFile.open(tmp_path / "malicious.gymdelta", SPEC) as malicious:
            every = [*updates, malicious]
            found = inner_products(stacks_of(every, SPEC), [update.norm() for update in every])
            alone = inner_products(stacks_of(updates, SPEC), [update.norm() for update in updates])
    assert bool(torch.isfinite(found).all())
    torch.testing.assert_close(found[:4, :4], alone, rtol=1e-12, atol=0)
    assert float(found[4, 4]) == pytest.approx(1e60 * SPEC.num_parameters, rel=1e-6)


def test_each_tensor_takes_the_cheapest_form(tmp_path: Path) -> None:
    kinds = {
        "signs": (SIGNS, SignStack),
        "rows": (ROW_SIGNS, SignStack),
        "binary": (BINARY, SignStack),
        "signs of two names": (TWO_NAMES, SignStack),
        "asymmetric binary": ([("binary", {"symmetric": False})] * 2, DecodedStack),
        "levels": (LEVELS, DecodedStack),
        "two kinds of scales": ([SIGNS[0], ROW_SIGNS[0]], DecodedStack),
        "factors": (FACTORS, FactorStack),
        "mixed": (MIXED, DecodedStack),
    }
    for number, (codecs, kind) in enumerate(kinds.values()):
        folder = tmp_path / str(number)
        folder.mkdir()
        with written(folder, codecs) as updates:
            assert type(stack_of("down", updates, SHAPES["down"])) is kind


def test_an_update_that_leaves_a_tensor_out_counts_as_zero(tmp_path: Path) -> None:
    for codec, params in (SIGNS[0], FACTORS[1]):
        with written(tmp_path, [(codec, params)] * 3) as updates:
            entries = [DeltaEntry.of("up", deltas(7)["up"], codec, **params)]
            write_delta(tmp_path / "half.gymdelta", entries, SPEC)
            with DeltaFile.open(tmp_path / "half.gymdelta", SPEC) as half:
                found = soup([*updates, half], tmp_path / "soup.gymdelta", recipe(aggregator="mean"))
                expected = sum(update.decode("down") for update in updates) / 4
        torch.testing.assert_close(found["down"], expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("loud", [3.0, 1e2, 1e4, 1e8, 1e30])
@pytest.mark.parametrize("rule", ["trimmed_mean", "median"])
def test_a_malicious_clients_scale_does_not_make_the_votes_of_the_honest_coarse(
    tmp_path: Path, rule: str, loud: float
) -> None:
    with contextlib.ExitStack() as stack:
        opened = []
        for index, scale in enumerate((0.01, 0.011, 0.012, 0.013, 0.014, 0.01 * loud)):
            entry = DeltaEntry.of("down", scale * deltas(index)["down"].sign())
            write_delta(tmp_path / f"{index}.gymdelta", [entry], SPEC)
            opened.append(stack.enter_context(DeltaFile.open(tmp_path / f"{index}.gymdelta", SPEC)))
        wanted = recipe(aggregator=rule, num_malicious_nodes=1)
        found = soup(opened, tmp_path / "s.gymdelta", wanted)["down"]
        expected = decoded_soup(opened, tmp_path, wanted)["down"]
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def test_votes_of_very_many_updates_stay_fine_or_are_not_used() -> None:
    for count, exact in ((1000, True), (40_000, True)):
        strengths = torch.full((3, count), 1.0 / count, dtype=torch.float64)
        total = signs._total(strengths)
        assert total is not None
        votes, unit = signs.whole_votes(strengths, total)
        error = float((votes.double() * unit - strengths).sum(dim=1).abs().max())
        assert (error <= signs.TRIMMED_ERROR) is exact
        assert int(votes.long().abs().sum(dim=1).max()) <= total
    uneven = torch.diag(torch.tensor([1.0, 1.0, 1.0, 1e9], dtype=torch.float64))
    assert signs._total(uneven) is None


def test_votes_round_strengths_to_whole_numbers_that_fit_and_give_them_back() -> None:
    strengths = torch.rand(5, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for total in (*signs.TRIMMED_TOTALS, signs.COMBINATION_TOTAL):
        votes, unit = signs.whole_votes(strengths, total)
        assert int(votes.long().abs().sum(dim=1).max()) <= total
        torch.testing.assert_close(votes.double() * unit, strengths, rtol=0, atol=unit)
    assert signs.whole_votes(torch.zeros(2, 3, dtype=torch.float64), 100)[1] == 0.0


@pytest.mark.parametrize("rule", ["mean", "multi_krum", "geometric_median"])
def test_lora_updates_make_a_soup_of_factors_that_is_their_true_combination(
    tmp_path: Path, rule: str
) -> None:
    whole = CodecPolicy(codec="lora", lora_rank=64, factors="float32", error_feedback=False)
    with contextlib.ExitStack() as stack:
        updates = [stack.enter_context(file) for file in adapters(tmp_path, ranks=(1, 2, 4, 4, 2, 1, 3))]
        report = merge(
            updates,
            [1.0] * 7,
            SoupRecipe(aggregator=rule, num_malicious_nodes=0, codec=whole),
            tmp_path / "s.gymdelta",
            SPEC,
        )
        assert report.coefficients is not None
        true = sum(
            c * update.decode("down").double() for c, update in zip(report.coefficients, updates, strict=True)
        )
        with DeltaFile.open(tmp_path / "s.gymdelta", SPEC) as found:
            assert found.record("down").codec == "lora"
            error = float((found.decode("down").double() - true).norm() / true.norm())
    assert error <= 1e-6


def test_cut_to_a_rank_the_soup_and_its_residual_add_up_to_the_true_combination(tmp_path: Path) -> None:
    cut = CodecPolicy(codec="lora", lora_rank=3, factors="float32", error_feedback=False)
    with contextlib.ExitStack() as stack:
        updates = [stack.enter_context(file) for file in adapters(tmp_path, ranks=(2, 2, 4))]
        paths = tmp_path / "s.gymdelta", tmp_path / "rest.gymdelta"
        report = merge(updates, [1.0] * 3, SoupRecipe(codec=cut), paths[0], SPEC, residual_path=paths[1])
        true = sum(update.decode("down").double() for update in updates) / 3
        kept, rest = (
            stack.enter_context(DeltaFile.open(path, SPEC)).decode("down").double() for path in paths
        )
    u, s, v = torch.linalg.svd(true)
    best = u[:, :3] * s[:3] @ v[:3]
    torch.testing.assert_close(kept, best, rtol=0, atol=1e-6 * float(s[0]))
    torch.testing.assert_close(kept + rest, true, rtol=0, atol=1e-6 * float(s[0]))
    assert report.lost["down"] == pytest.approx(float(s[3:].norm() / s.norm()), rel=1e-5)


def test_a_residual_is_refused_where_there_is_none(tmp_path: Path) -> None:
    with written(tmp_path, SIGNS[:3]) as updates, pytest.raises(GymError, match="residual") as caught:
        merge(
            updates,
            [1.0] * 3,
            recipe(),
            tmp_path / "s.gymdelta",
            SPEC,
            residual_path=tmp_path / "rest.gymdelta",
        )
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert not (tmp_path / "s.gymdelta").exists()


@pytest.mark.parametrize("rule", ["median", "trimmed_mean"])
def test_with_one_a_for_all_coordinate_rules_work_on_b_and_keep_its_rank(tmp_path: Path, rule: str) -> None:
    with contextlib.ExitStack() as stack:
        updates = [stack.enter_context(file) for file in adapters(tmp_path, ranks=(3,) * 5, one_a=True)]
        found = soup(updates, tmp_path / "s.gymdelta", recipe(aggregator=rule, num_malicious_nodes=1))
        pairs = [Lora().factors(u.payload("down"), SHAPES["down"], u.record("down").params) for u in updates]
    b = torch.stack([pair[1].double() for pair in pairs]).numpy()
    middle = np.median(b, axis=0) if rule == "median" else np.sort(b, axis=0)[1:-1].mean(axis=0)
    expected = 0.25 * torch.from_numpy(middle) @ pairs[0][0].double()
    torch.testing.assert_close(found["down"].double(), expected, rtol=0, atol=1e-6)
    assert int(torch.linalg.matrix_rank(found["down"].double(), rtol=1e-5)) == 3


def test_a_rank_above_the_smaller_side_and_updates_that_cancel_out_are_no_trouble(tmp_path: Path) -> None:
    policy = CodecPolicy(codec="lora", lora_rank=12, factors="float32", error_feedback=False)
    with contextlib.ExitStack() as stack:
        a, b = torch.randn(4, 7), torch.randn(33, 4)
        opened = []
        for index, sign in enumerate((1, -1, 1, 1)):
            encoded = Lora().encode_factors(a, sign * b)
            entry = DeltaEntry("up", SHAPES["up"], "lora", encoded.params, lambda e=encoded: e.payload)
            write_delta(tmp_path / f"{index}.gymdelta", [entry], SPEC)
            opened.append(stack.enter_context(DeltaFile.open(tmp_path / f"{index}.gymdelta", SPEC)))
        nothing = merge(opened[:2], [1.0] * 2, SoupRecipe(codec=policy), tmp_path / "none", SPEC)
        some = merge(opened, [1.0] * 4, SoupRecipe(codec=policy), tmp_path / "some", SPEC)
        with DeltaFile.open(tmp_path / "some", SPEC) as found:
            expected = opened[0].decode("up") / 2
            torch.testing.assert_close(found.decode("up"), expected, rtol=1e-5, atol=1e-6)
    assert nothing.norm == 0.0
    assert some.lost == {"up": pytest.approx(0.0, abs=1e-6)}


def test_with_one_a_a_median_is_written_as_factors_with_that_a(tmp_path: Path) -> None:
    policy = CodecPolicy(codec="lora", lora_rank=3, factors="float32", error_feedback=False)
    with contextlib.ExitStack() as stack:
        updates = [stack.enter_context(file) for file in adapters(tmp_path, ranks=(3,) * 5, one_a=True)]
        merge(
            updates,
            [1.0] * 5,
            SoupRecipe(aggregator="median", codec=policy),
            tmp_path / "s.gymdelta",
            SPEC,
        )
        found = stack.enter_context(DeltaFile.open(tmp_path / "s.gymdelta", SPEC))
        assert torch.equal(found.payload("down")["a"], updates[0].payload("down")["a"].float())


def adapters(folder: Path, ranks: Sequence[int], one_a: bool = False) -> Iterator[DeltaFile]:
    """LoRA updates of ``down`` alone."""
    generator = torch.Generator().manual_seed(3)
    rows, cols = SHAPES["down"]
    first = torch.randn(ranks[0], cols, generator=generator)
    for index, rank in enumerate(ranks):
        a = first if one_a else torch.randn(rank, cols, generator=generator)
        encoded = Lora().encode_factors(
            a, torch.randn(rows, rank, generator=generator), 0.25 if one_a else 0.5 + index
        )
        entry = DeltaEntry("down", SHAPES["down"], "lora", encoded.params, lambda e=encoded: e.payload)
        write_delta(folder / f"adapter-{index}.gymdelta", [entry], SPEC)
        yield DeltaFile.open(folder / f"adapter-{index}.gymdelta", SPEC)


STORED = {
    "median": "34e0c4a07ca7c3c64cc0c7d1cc08419e26545f2dbfaa4e2d1a26893cc6b976b3",
    "multi_krum": "b266b219d4b04e52cd3d238d9eb45a58ae78facc6ba9fa0319d93e2d19032cf8",
    "mean": "f6b8d120b575df2d1781992269db87170fc44cac16b0f8a0efe6319ec1eabd7b",
}
"""Soups of nine ``binary`` updates as they were when all of them were decoded; a ledger holds such digests."""


@pytest.mark.parametrize("rule", STORED)
def test_a_recipe_stored_without_a_merge_version_gives_the_soup_of_its_day(tmp_path: Path, rule: str) -> None:
    stored = recipe(aggregator=rule, num_malicious_nodes=2 * (rule == "multi_krum")).model_dump(mode="json")
    assert stored.pop("merge_version") == 2
    with written(tmp_path, BINARY) as updates:
        old = merge(updates, [1.0] * 9, SoupRecipe.recorded(stored), tmp_path / "old.gymdelta", SPEC)
        new = merge(updates, [1.0] * 9, SoupRecipe(**stored), tmp_path / "new.gymdelta", SPEC)
    assert old.sha256 == STORED[rule]
    assert new.sha256 != old.sha256


@pytest.mark.parametrize("version", [1, 2])
def test_a_recipe_that_records_its_merge_version_gives_the_same_soup_again(
    tmp_path: Path, version: int
) -> None:
    wanted = recipe(aggregator="median", merge_version=version)
    stored = wanted.model_dump(mode="json")
    with written(tmp_path, BINARY) as updates:
        first = merge(updates, [1.0] * 9, wanted, tmp_path / "a.gymdelta", SPEC)
        again = merge(updates, [1.0] * 9, SoupRecipe.recorded(stored), tmp_path / "b.gymdelta", SPEC)
    assert again.sha256 == first.sha256
    assert (first.sha256 == STORED["median"]) == (version == 1)


def test_binary_updates_give_the_soup_of_the_same_signs_in_bitdelta(tmp_path: Path) -> None:
    """The bits are the same; the scales, means of magnitudes summed in another order, are set alike here."""

    def same_payload(update: DeltaFile, name: str, field: str) -> Payload:
        payload = update.payload(name)
        return {"scales": payload["scales"], field: payload["bits"]} if "bits" in payload else payload

    for field, codec in (("bits", "bitdelta"), ("codes", "binary")):
        (tmp_path / codec).mkdir()
        with written(tmp_path / codec, SIGNS) as updates:
            for index, update in enumerate(updates):
                entries = [
                    DeltaEntry(
                        record.name,
                        record.shape,
                        codec if record.codec == "bitdelta" else record.codec,
                        record.params,
                        partial(same_payload, update, record.name, field),
                    )
                    for record in update.manifest.tensors
                ]
                write_delta(tmp_path / codec / f"same-{index}.gymdelta", entries, SPEC)
    soups = []
    for codec in ("bitdelta", "binary"):
        with contextlib.ExitStack() as stack:
            paths = [tmp_path / codec / f"same-{index}.gymdelta" for index in range(9)]
            same = [stack.enter_context(DeltaFile.open(path, SPEC)) for path in paths]
            wanted = recipe(aggregator="median", pre_aggregators=["nnm"], num_malicious_nodes=2)
            soups.append(merge(same, [1.0] * 9, wanted, tmp_path / codec / "soup.gymdelta", SPEC).sha256)
    assert soups[0] == soups[1]


WIDE = BaseSpec.of({"wide": torch.zeros(3, 4003)}, "wide")
EVERY = [
    ("bitdelta", {}),
    ("bitdelta", {"group_size": 100, "scale_dtype": "bfloat16"}),
    ("binary", {"symmetric": False}),
    ("ternary", {"group_size": 64}),
    ("int2", {"group_size": 4003}),
    ("int4", {"group_size": 30}),
    ("int8", {}),
    ("dense", {}),
    ("lora", {"rank": 2}),
]


@contextlib.contextmanager
def wide_updates(folder: Path) -> Iterator[list[DeltaFile]]:
    with contextlib.ExitStack() as stack:
        opened = []
        for index, (codec, params) in enumerate(EVERY):
            delta = torch.randn(3, 4003, generator=torch.Generator().manual_seed(index)) * 0.01
            path = folder / f"wide-{index}.gymdelta"
            write_delta(path, [DeltaEntry.of("wide", delta, codec, **params)], WIDE)
            opened.append(stack.enter_context(DeltaFile.open(path, WIDE)))
        yield opened


@pytest.mark.parametrize(
    ("held", "largest"), [(9 * 4003 * 3, 9 * 4003 * 3), (9 * 1000, 9 * 1000), (10, 9 * 40)]
)
def test_of_long_rows_no_more_is_decoded_than_a_block_holds_and_the_soup_is_the_same(
    tmp_path: Path, held: int, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = recipe(aggregator="median")
    sizes = []
    with wide_updates(tmp_path) as updates:
        expected = merge(updates, [1.0] * 9, wanted, tmp_path / "whole.gymdelta", WIDE).sha256
        monkeypatch.setattr(decoded, "BLOCK_ELEMENTS", held)
        stack = stack_of("wide", updates, (3, 4003))
        for (rows, cols), block in stack._blocks():  # type: ignore[attr-defined]
            sizes.append(block.numel())
            for row, update in zip(block, updates, strict=True):
                assert torch.equal(row.reshape(rows.stop - rows.start, -1), update.decode("wide")[rows, cols])
        found = merge(updates, [1.0] * 9, wanted, tmp_path / "parts.gymdelta", WIDE).sha256
    assert max(sizes) <= largest
    assert sum(sizes) == 9 * 3 * 4003
    assert found == expected


def test_merging_of_version_1_holds_whole_rows_so_that_its_sums_keep_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoded, "BLOCK_ELEMENTS", 9 * 1000)
    with wide_updates(tmp_path) as updates:
        stack = stack_of("wide", updates, (3, 4003), 1)
        places = [place for place, _ in stack._blocks()]  # type: ignore[attr-defined]
    assert places == [(slice(row, row + 1), slice(0, 4003)) for row in range(3)]


def test_a_released_stack_of_signs_holds_nothing_of_its_updates(tmp_path: Path) -> None:
    with written(tmp_path, SIGNS[:3]) as updates:
        signs = [stack for stack in stacks_of(updates, SPEC) if isinstance(stack, SignStack)]
        assert signs
        for stack in signs:
            stack.products(torch.ones(3, dtype=torch.float64))
            before = set(vars(stack))
            stack.release()
            assert before - set(vars(stack)) == {"_parts"}, "the views of the files are gone"
