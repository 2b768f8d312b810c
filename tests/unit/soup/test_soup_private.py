"""A private merge: nobody changes the whole-number query by more than the clip, and everything seen is behind noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.privacy import AdaptiveClipping, PrivacyConfig, ReleasePrivacy
from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.encode import lora_delta
from gym_fed.delta.feedback import ErrorFeedback
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.writer import DeltaEntry, write_delta
from gym_fed.privacy.clipping import UNITS, Ruler, next_norm, noise_left, on_lattice, scale_factors
from gym_fed.privacy.noise import NoiseSource
from gym_fed.soup import stacks as decoded_stack
from gym_fed.soup.building import build_aggregator, build_optimizer
from gym_fed.soup.merging import SoupReport, merge
from gym_fed.soup.optimizer import OptimizerState
from gym_fed.soup.private import ClippedMiddle, PrivateMerge, SignVotes
from gym_fed.soup.votes_soup import soup_from_votes

SHAPES = {"layers.0.down": (8, 24), "layers.0.up": (24, 8), "norm": (8,)}
SPEC = BaseSpec.of({name: torch.zeros(shape) for name, shape in SHAPES.items()}, "tiny")
EXACT = CodecPolicy(codec="dense", dense_dtype="float32", error_feedback=False)
RULES = [("mean", 0), ("trimmed_mean", 1), ("median", 0)]
SEED = bytes(range(32))
SILENT = 1e-6
"""A noise multiplier whose noise rounds to nothing on the lattice: what is left is the query."""


def private(**changes: Any) -> PrivateMerge:
    own = {key: changes.pop(key) for key in ("adaptive", "frozen_a", "tensors", "seed") if key in changes}
    return PrivateMerge(ReleasePrivacy(**changes), **{"seed": SEED, "tensors": tuple(SHAPES), **own})


def recipe(aggregator: str = "mean", malicious: int = 0, **changes: Any) -> SoupRecipe:
    return SoupRecipe(aggregator=aggregator, num_malicious_nodes=malicious, **{"codec": EXACT, **changes})


def values(seed: int, scale: float = 0.1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


Write = Callable[..., list[DeltaFile]]


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """Updates as open files."""
    with ExitStack() as stack:
        count = 0

        def files(updates: Sequence[dict[str, torch.Tensor]], codec: str = "dense") -> list[DeltaFile]:
            nonlocal count
            opened = []
            for update in updates:
                count += 1
                path = tmp_path / f"update-{count}.gymdelta"
                options = {"dtype": "float32"} if codec == "dense" else {}
                entries = [DeltaEntry.of(name, delta, codec, **options) for name, delta in update.items()]
                write_delta(path, entries, SPEC)
                opened.append(stack.enter_context(DeltaFile.open(path, SPEC)))
            return opened

        yield files


def soup(
    files: list[DeltaFile], path: Path, rules: SoupRecipe, chosen: PrivateMerge
) -> tuple[SoupReport, dict[str, torch.Tensor]]:
    report = merge(files, [1.0] * len(files), rules, path, SPEC, private=chosen)
    with DeltaFile.open(path, SPEC) as made:
        return report, {
            name: made.decode(name) if name in made else torch.zeros(SHAPES[name]) for name in SHAPES
        }


# ---- sensitivity ----


@settings(max_examples=60)
@given(
    rows=hnp.arrays(np.int64, (5, 12), elements=st.integers(-(2**17), 2**17)),
    who=st.integers(0, 4),
    rule=st.sampled_from(RULES),
)
def test_zeroing_one_update_changes_the_query_by_no_more_than_its_norm(
    rows: np.ndarray, who: int, rule: tuple[str, int]
) -> None:
    query = ClippedMiddle(private(), {"w": np.ones(5)}, 5, build_aggregator(recipe(*rule)))
    neighbour = rows.copy()
    neighbour[who] = 0
    found = []
    for updates in (rows, neighbour):
        query.begin("w")
        found.append(query.exact("w", updates.astype(np.float64)))
    change = [int(value) for value in found[0] - found[1]]
    assert sum(value**2 for value in change) <= sum(int(value) ** 2 for value in rows[who])


def test_a_vote_changes_the_query_by_the_root_of_the_coordinates_at_most() -> None:
    query = SignVotes(private(mechanism="discrete_gaussian"), 3, 4, build_aggregator(recipe()))
    rows = np.array([[1e30, -1e-30, 0.0, 5.0], [1.0, 1.0, 1.0, 1.0], [-1.0, -1.0, -1.0, -1.0]])
    assert query.exact("w", rows).tolist() == [1, -1, 0, 1]
    rows[0] = 0
    assert query.exact("w", rows).tolist() == [0, 0, 0, 0]
    rows[0] = [np.nan, np.inf, -np.inf, np.nan]
    assert query.exact("w", rows).tolist() == [0, 1, -1, 0]


def test_an_update_that_overflows_counts_as_zero() -> None:
    factors = scale_factors([[float("inf"), 1.0], [float("nan"), 1.0], [3.0, 4.0]], 1.0, per_layer=False)
    assert factors[:2].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert on_lattice(np.array([[np.inf], [np.nan], [3.0]]), factors[:, 0])[:2].tolist() == [[0], [0]]


@settings(max_examples=60)
@given(
    rows=hnp.arrays(np.float32, (3, 40), elements=st.floats(-(2.0**100), 2.0**100, width=32)),
    norm=st.floats(1e-3, 1e3),
    per_layer=st.booleans(),
)
def test_integers_on_the_lattice_are_never_longer_than_the_clip(
    rows: np.ndarray, norm: float, per_layer: bool
) -> None:
    parts = {"a": rows[:, :10], "b": rows[:, 10:]}
    norms = [[float(np.linalg.norm(part[i].astype(np.float64))) for part in parts.values()] for i in range(3)]
    factors = scale_factors(norms, norm, per_layer)
    ruler = Ruler(3)
    for at, (name, part) in enumerate(parts.items()):
        ruler.begin(name)
        integers = on_lattice(part, factors[:, at])
        ruler.add(name, integers)
        bound = UNITS**2 / 2 if per_layer else UNITS**2
        assert all(sum(int(v) ** 2 for v in row) <= bound for row in integers)
        shorter = np.abs(integers * (norm / UNITS)) <= np.abs(part.astype(np.float64)) * (1 + 1e-12)
        assert bool(shorter.all())
    assert bool((ruler.squares <= UNITS**2).all())


def test_an_update_above_the_bound_releases_nothing() -> None:
    ruler = Ruler(1)
    ruler.begin("w")
    ruler.add("w", np.array([[UNITS]]))
    with pytest.raises(GymError) as caught:
        ruler.add("w", np.array([[1]]))
    assert caught.value.code is ErrorCode.INTERNAL
    with pytest.raises(GymError, match="nothing was released"):
        on_lattice(np.array([[2.0]]), np.array([float(UNITS)]))


# ---- what the soup is ----


@pytest.mark.parametrize(("rule", "malicious"), RULES)
@pytest.mark.parametrize("codec", ["dense", "bitdelta"])
def test_without_audible_noise_the_soup_is_the_rule_on_the_clipped_updates(
    rule: str, malicious: int, codec: str, write: Write, tmp_path: Path
) -> None:
    updates = [values(seed) for seed in range(4)]
    files = write(updates, codec)
    _, found = soup(
        files, tmp_path / "soup", recipe(rule, malicious), private(noise_multiplier=SILENT, clipping_norm=0.5)
    )
    for name in SHAPES:
        clipped = torch.stack([f.decode(name).double() * min(1.0, 0.5 / f.norm()) for f in files])
        ordered = clipped.sort(dim=0).values
        wanted = clipped.mean(dim=0) if rule == "mean" else ordered[1:3].mean(dim=0)
        torch.testing.assert_close(found[name].double(), wanted, atol=3 * 0.5 / UNITS, rtol=1e-5)


def test_every_layer_has_its_own_clip(write: Write, tmp_path: Path) -> None:
    files = write([{**values(0), "norm": 100.0 * torch.ones(8)}])
    chosen = private(noise_multiplier=SILENT, clipping_norm=0.5, clipping="per_layer")
    _, found = soup(files, tmp_path / "soup", recipe(), chosen)
    for name in SHAPES:
        assert found[name].norm() == pytest.approx(0.5 / 3**0.5, rel=1e-4)


def test_noise_has_the_size_that_is_accounted_for_and_is_on_tensors_that_nobody_sent(
    write: Write, tmp_path: Path
) -> None:
    sent = {name: values(1)[name] for name in ("layers.0.down", "layers.0.up")}
    quiet, found = soup(
        write([sent] * 4), tmp_path / "a", recipe(), private(noise_multiplier=SILENT, clipping_norm=2.0)
    )
    _, loud = soup(
        write([sent] * 4), tmp_path / "b", recipe(), private(noise_multiplier=3.0, clipping_norm=2.0)
    )
    noise = torch.cat([(loud[name] - found[name]).reshape(-1) for name in SHAPES])
    assert noise.std().item() == pytest.approx(3.0 * 2.0 / 4, rel=0.15)
    assert bool((loud["norm"] != 0).all())
    assert (quiet.update_norms, quiet.clip_factors, quiet.coefficients) == ((), (), None)
    assert quiet.private is not None
    assert quiet.private.coordinates == 8 * 24 * 2 + 8


@pytest.mark.parametrize("rule", ["mean", "trimmed_mean", "median"])
def test_the_same_seed_gives_the_same_bytes_in_any_blocks_and_another_seed_others(
    rule: str, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write([values(seed) for seed in range(5)], "bitdelta")
    rules, chosen = recipe(rule, 1 if rule == "trimmed_mean" else 0), private()
    first, _ = soup(files, tmp_path / "a", rules, chosen)
    monkeypatch.setattr(decoded_stack, "BLOCK_ELEMENTS", 130)
    again, _ = soup(files, tmp_path / "b", rules, chosen)
    other, _ = soup(files, tmp_path / "c", rules, private(seed=bytes(32)))
    assert first.sha256 == again.sha256 != other.sha256


def test_what_follows_the_noise_is_the_same_as_in_any_merge(write: Write, tmp_path: Path) -> None:
    files = write([values(seed) for seed in range(3)])
    _, once = soup(files, tmp_path / "a", recipe(), private())
    _, twice = soup(files, tmp_path / "b", recipe(server_learning_rate=2.0), private())
    assert all(torch.equal(twice[name], 2 * once[name]) for name in SHAPES)
    signs = CodecPolicy(codec="bitdelta", small_tensors="bitdelta")
    feedback = ErrorFeedback(tmp_path / "residual", SPEC.digest, {})
    rules = recipe(codec=signs)
    merge(files, [1.0] * 3, rules, tmp_path / "c", SPEC, feedback, private=private())
    with DeltaFile.open(tmp_path / "c", SPEC) as made:
        assert all(torch.equal(torch.sign(made.decode(n)), torch.sign(once[n])) for n in SHAPES)
    rules = recipe(codec=CodecPolicy(codec="lattice"))
    merge(files, [1.0] * 3, rules, tmp_path / "d", SPEC, feedback, private=private())
    with DeltaFile.open(tmp_path / "d", SPEC) as made:
        for name in SHAPES:
            found = made.integers(name)
            assert found is not None
            assert float((made.decode(name) - once[name]).abs().max()) <= 2.0 ** (found.exponent - 1)


# ---- votes ----


def test_votes_count_signs_and_not_sizes(write: Write, tmp_path: Path) -> None:
    updates = [values(seed) for seed in range(3)]
    louder = [{name: (seed + 1) * 10.0 * v for name, v in u.items()} for seed, u in enumerate(updates)]
    chosen = private(mechanism="discrete_gaussian", noise_multiplier=1e-3, clipping_norm=2.0)
    made = [soup(write(u), tmp_path / str(i), recipe(), chosen)[1] for i, u in enumerate((updates, louder))]
    unit = 2.0 / (8 * 24 * 2 + 8) ** 0.5
    for name in SHAPES:
        votes = torch.stack([update[name].sign() for update in updates]).sum(dim=0)
        assert torch.equal(made[0][name], made[1][name])
        noise = made[0][name] * 3 / unit - votes  # of variance one at least, and whole
        assert noise.std().item() < 1.7
        assert bool(((noise - noise.round()).abs() < 0.01).all())
    _, sign = soup(
        write(updates), tmp_path / "m", recipe("majority_vote"), private(mechanism="discrete_gaussian")
    )
    for tensor in sign.values():
        assert bool((tensor.abs() - unit / 2).abs().max() < 1e-6)


def test_votes_added_up_under_masks_give_the_soup_of_votes_that_the_hub_adds_up(
    write: Write, tmp_path: Path
) -> None:
    updates = [values(seed) for seed in range(3)]
    chosen = private(mechanism="discrete_gaussian", clipping_norm=2.0)
    for rule in ("mean", "majority_vote"):
        seen, _ = soup(write(updates), tmp_path / rule, recipe(rule), chosen)
        sums = [
            (
                name,
                torch.stack([u[name].sign().reshape(-1) for u in updates]).sum(dim=0).numpy().astype("int16"),
            )
            for name in sorted(SHAPES)
        ]
        hidden = soup_from_votes(
            sums, 3, 4, 2.0, recipe(rule), tmp_path / f"{rule}-sum", SPEC, private=chosen
        )
        assert hidden.sha256 == seen.sha256


def test_the_server_optimiser_takes_its_step_on_a_sum_of_votes(tmp_path: Path) -> None:
    sums = [(name, np.ones(math.prod(SHAPES[name]), np.int16)) for name in sorted(SHAPES)]
    chosen = recipe("mean", server_optimizer="adam")
    optimizer = build_optimizer(chosen)
    assert optimizer is not None
    state = OptimizerState(rule=optimizer.rule)
    plain = soup_from_votes(sums, 3, 4, 2.0, recipe("mean"), tmp_path / "plain", SPEC)
    stepped = soup_from_votes(sums, 3, 4, 2.0, chosen, tmp_path / "stepped", SPEC, optimizer_state=state)
    assert stepped.sha256 != plain.sha256


@pytest.mark.parametrize("others", [-1, 0, 1])
def test_behind_noise_a_sum_that_no_votes_have_ends_no_round(others: int, tmp_path: Path) -> None:
    """A malicious client adds n of its own: whether the sum is above n would be the others' vote, without any noise."""
    sums = [(name, np.full(math.prod(SHAPES[name]), 3 + others, np.int16)) for name in sorted(SHAPES)]
    chosen = private(mechanism="discrete_gaussian", clipping_norm=2.0)
    soup_from_votes(sums, 3, 4, 2.0, recipe("mean"), tmp_path / "noised", SPEC, private=chosen)
    if others > 0:
        with pytest.raises(GymError, match="the sum of 3 votes is 4"):
            soup_from_votes(sums, 3, 4, 2.0, recipe("mean"), tmp_path / "plain", SPEC)


# ---- LoRA ----


def frozen(name: str, cols: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(cols)
    return torch.randn(2, cols, generator=generator).to(torch.bfloat16)


MATRICES = ("layers.0.down", "layers.0.up")


@pytest.fixture
def adapters(tmp_path: Path) -> Any:
    with ExitStack() as stack:
        files = []
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            factors = {
                name: (
                    frozen(name, SHAPES[name][1]),
                    torch.randn(SHAPES[name][0], 2, generator=generator),
                    2.0,
                )
                for name in MATRICES
            }
            lora_delta(factors, tmp_path / f"lora-{seed}", SPEC)
            files.append(stack.enter_context(DeltaFile.open(tmp_path / f"lora-{seed}", SPEC)))
        yield files


def test_with_a_frozen_a_the_noise_is_on_b_and_the_soup_is_its_product_with_a(
    adapters: list[DeltaFile], tmp_path: Path
) -> None:
    chosen = private(tensors=MATRICES, frozen_a=frozen, noise_multiplier=5.0)
    _, dense = soup(adapters, tmp_path / "dense", recipe(), chosen)
    as_factors = recipe(codec=CodecPolicy(codec="lora", lora_rank=2, factors="float32", error_feedback=False))
    report, factors = soup(adapters, tmp_path / "factors", as_factors, chosen)
    for name in MATRICES:
        assert int(torch.linalg.matrix_rank(dense[name])) == 2
        torch.testing.assert_close(dense[name], factors[name], atol=1e-5, rtol=1e-5)
    assert report.private is not None
    assert report.private.coordinates == 2 * (8 + 24)
    assert not dense["norm"].any()


def test_an_update_with_another_a_is_refused(adapters: list[DeltaFile], tmp_path: Path) -> None:
    def other(name: str, cols: int) -> torch.Tensor:
        return frozen(name, cols) + 1

    with pytest.raises(GymError, match="has an A that differs from the round's"):
        soup(adapters, tmp_path / "soup", recipe(), private(tensors=MATRICES, frozen_a=other))


def test_a_tensor_that_the_task_does_not_train_is_refused(write: Write, tmp_path: Path) -> None:
    with pytest.raises(GymError, match=r"'norm' of an update is not one that the task trains"):
        soup(write([values(0)]), tmp_path / "soup", recipe(), private(tensors=MATRICES))


# ---- adaptive clipping ----


def test_sum_and_count_together_cost_what_was_asked_for() -> None:
    adaptive = AdaptiveClipping(count_noise_std=2.0)
    left = noise_left(1.0, adaptive)
    assert left > 1.0
    assert left**-2 + (2 * 2.0) ** -2 == pytest.approx(1.0)
    assert noise_left(1.0, None) == 1.0
    with pytest.raises(ValueError, match=r"must be above noise_multiplier / 2 = 0.5"):
        PrivacyConfig(epsilon=1, adaptive_clipping={"count_noise_std": 0.5})


def test_the_norm_moves_towards_the_quantile(write: Write, tmp_path: Path) -> None:
    adaptive = AdaptiveClipping(count_noise_std=1e-9, learning_rate=0.2)
    source = NoiseSource(SEED)
    assert next_norm(1.0, 4, 4, adaptive, source) == pytest.approx(np.exp(-0.1))
    assert next_norm(1.0, 0, 4, adaptive, source) == pytest.approx(np.exp(0.1))
    assert next_norm(1.0, 2, 4, adaptive, source) == pytest.approx(1.0)
    files = write([values(seed) for seed in range(4)])
    norm = sorted(f.norm() for f in files)[-1] + 0.01
    chosen = private(
        clipping_norm=norm, noise_multiplier=1e-3, adaptive=AdaptiveClipping(count_noise_std=1e-2)
    )
    report, _ = soup(files, tmp_path / "soup", recipe(), chosen)
    assert report.private is not None
    assert report.private.next_clipping_norm == pytest.approx(norm * np.exp(-0.1), rel=0.01)


# ---- refusals ----


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"aggregator": "krum"}, "has no known bound"),
        ({"max_norm": 1.0}, "clipping_norm clips updates; remove it"),
        ({"pre_aggregators": ["nnm"], "aggregator": "median"}, "compare updates with each other"),
        ({"weighting": "num_examples", "num_examples_cap": 5, "aggregator": "median"}, "use uniform"),
    ],
    ids=["rule", "max_norm", "pre_aggregators", "weighting"],
)
def test_a_merge_that_is_not_accounted_for_is_refused(
    changes: dict[str, Any], reason: str, write: Write, tmp_path: Path
) -> None:
    with pytest.raises(GymError, match=reason) as caught:
        soup(write([values(0)]), tmp_path / "soup", recipe(**{"aggregator": "mean", **changes}), private())
    assert caught.value.code is ErrorCode.CONFIG_INVALID


# ---- the coordinator's own update as the judge ----


def gated(files: list[DeltaFile], path: Path, root: DeltaFile, **changes: Any) -> dict[str, torch.Tensor]:
    chosen = private(noise_multiplier=SILENT, **changes)
    merge(files, [1.0] * len(files), recipe("root_gate"), path, SPEC, root=root, private=chosen)
    with DeltaFile.open(path, SPEC) as made:
        return {name: made.decode(name) if name in made else torch.zeros(SHAPES[name]) for name in SHAPES}


def test_updates_that_point_away_from_the_root_count_as_zero_and_the_others_at_its_length_or_the_clips(
    write: Write, tmp_path: Path
) -> None:
    own = values(1)
    away = {name: -50 * tensor for name, tensor in own.items()}
    root, *files = write([own, own, away, {name: 0.01 * tensor for name, tensor in own.items()}])
    made = gated(files, tmp_path / "soup.gymdelta", root, clipping_norm=0.5)
    short = gated(files, tmp_path / "short.gymdelta", *write([{n: 1e-3 * t for n, t in own.items()}]))
    length = math.sqrt(sum(float(tensor.square().sum()) for tensor in own.values()))
    for name, tensor in made.items():  # two of three count, however long they are
        torch.testing.assert_close(tensor, own[name] * (2 / 3) * 0.5 / length, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(short[name], own[name] * (2 / 3) * 1e-3, rtol=1e-3, atol=1e-8)


def test_one_update_changes_a_gated_soup_by_no_more_than_the_clip_over_the_number(
    write: Write, tmp_path: Path
) -> None:
    root, *files = write([values(seed) for seed in range(6)])
    whole = gated(files, tmp_path / "whole.gymdelta", root, clipping_norm=0.5)
    for scale in (1e6, -1e6, 0.0):
        lie = {name: scale * tensor for name, tensor in values(0).items()}
        changed = [*files[:-1], *write([lie])]
        made = gated(changed, tmp_path / f"changed{scale}.gymdelta", root, clipping_norm=0.5)
        moved = math.sqrt(sum(float((made[n] - whole[n]).square().sum()) for n in SHAPES))
        assert moved <= 2 * 0.5 / 5 + 1e-6  # its own term, before and after


def test_where_nobody_is_on_the_roots_side_the_soup_is_noise_and_nobody_learns_it(
    write: Write, tmp_path: Path
) -> None:
    own = values(3)
    root, *files = write([own, {name: -tensor for name, tensor in own.items()}])
    made = gated(files, tmp_path / "soup.gymdelta", root)
    assert all(float(tensor.abs().max()) < 1e-4 for tensor in made.values())
