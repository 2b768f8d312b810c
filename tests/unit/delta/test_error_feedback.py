"""Error feedback: nothing is lost over rounds, and nothing is forgotten or kept by accident."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_fed.config.delta import CodecPolicy
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.encode import encode_delta
from gym_fed.delta.feedback import ErrorFeedback
from gym_fed.delta.file import DeltaFile

SHAPES = {"layers.0.down": (16, 172), "layers.1.down": (16, 172), "norm": (16,), "embed": (32, 16)}
BASE = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
SPEC = BaseSpec.of(BASE, "tiny")


def update(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.01 * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def one_round(folder: Path, policy: CodecPolicy, tuned: dict[str, torch.Tensor]) -> DeltaFile:
    residual = ErrorFeedback.load(folder / "residual", SPEC.digest)
    encode_delta(tuned, BASE, policy, folder / "update.gymdelta", SPEC, residual)
    residual.save()
    return DeltaFile.open(folder / "update.gymdelta", SPEC)


POLICIES = [
    CodecPolicy(),
    CodecPolicy(group_size=64, small_tensors="bitdelta"),
    CodecPolicy(codec="dense"),
    CodecPolicy(codec="lora", lora_rank=2),
    CodecPolicy(max_bits_per_weight=1.9, small_tensors="bitdelta"),
    CodecPolicy(max_bits_per_weight=1.2, small_tensors="bitdelta"),
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p.codec}-{p.max_bits_per_weight}")
@given(seeds=st.lists(st.integers(0, 1000), min_size=1, max_size=6))
@settings(max_examples=6)
def test_what_was_sent_plus_the_residual_is_what_was_meant(
    policy: CodecPolicy, seeds: list[int], tmp_path: Path
) -> None:
    ErrorFeedback.load(tmp_path / "residual", SPEC.digest).reset()
    sent = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    meant = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for seed in seeds:
        true = update(seed)
        with one_round(tmp_path, policy, true) as delta:
            for name in SHAPES:
                meant[name] += true[name]
                if name in delta:
                    sent[name] += delta.decode(name)
    residual = ErrorFeedback.load(tmp_path / "residual", SPEC.digest)
    for name in SHAPES:
        held = residual.residual(name)
        total = sent[name] + (0 if held is None else held)
        torch.testing.assert_close(total, meant[name], rtol=0, atol=1e-5)


def test_with_a_decay_old_errors_fade(tmp_path: Path) -> None:
    policy = CodecPolicy(small_tensors="bitdelta", feedback_decay=0.5)
    with one_round(tmp_path, policy, update(0)):
        pass
    before = ErrorFeedback.load(tmp_path / "residual", SPEC.digest)
    held = {name: before.residual(name) for name in SHAPES}
    with one_round(tmp_path, policy, update(1)) as delta:
        after = ErrorFeedback.load(tmp_path / "residual", SPEC.digest)
        for name, old in held.items():
            found = after.residual(name)
            assert old is not None
            assert found is not None
            torch.testing.assert_close(found, update(1)[name] + 0.5 * old - delta.decode(name))


def test_sparse_updates_have_a_decay_by_default_and_others_none() -> None:
    assert CodecPolicy(codec="sparse_sign").decay == 0.95
    assert CodecPolicy(codec="sparse_sign", feedback_decay=1.0).decay == 1.0
    assert CodecPolicy().decay == 1.0
    with pytest.raises(ValueError, match="feedback_decay needs error_feedback: true"):
        CodecPolicy(error_feedback=False, feedback_decay=0.9)


def test_a_tensor_that_is_left_out_rises_to_the_top_in_a_later_round(tmp_path: Path) -> None:
    quiet, loud = "layers.0.down", "layers.1.down"
    policy = CodecPolicy(max_bits_per_weight=1.0, small_tensors="bitdelta")
    true = update(0)
    true[quiet] *= 0.8
    spoken = []
    for _ in range(6):
        with one_round(tmp_path, policy, true) as delta:
            assert delta.bits_per_weight <= 1.0
            spoken.append({name for name in (quiet, loud) if name in delta})
    assert quiet not in spoken[0]
    assert any(quiet in names for names in spoken[1:])


def test_the_residual_changes_only_when_it_is_committed(tmp_path: Path) -> None:
    residual = ErrorFeedback.load(tmp_path / "residual", "lineage")
    residual.record("a", torch.ones(3))
    staged = residual.stage()
    assert torch.equal(residual.compensated("a", torch.ones(3)), torch.ones(3))
    assert ErrorFeedback.load(tmp_path / "residual", "lineage").names() == ()
    residual.commit()
    assert torch.equal(residual.compensated("a", torch.ones(3)), torch.full((3,), 2.0))
    assert not staged.exists()


def test_a_staged_residual_outlives_a_crash(tmp_path: Path) -> None:
    before = ErrorFeedback.load(tmp_path / "residual", "lineage")
    before.record("a", torch.ones(3))
    before.stage(tmp_path / "update-7.residual")
    after = ErrorFeedback.load(tmp_path / "residual", "lineage")
    after.commit(tmp_path / "update-7.residual")
    assert torch.equal(after.compensated("a", torch.zeros(3)), torch.ones(3))
    assert torch.equal(
        ErrorFeedback.load(tmp_path / "residual", "lineage").compensated("a", torch.zeros(3)), torch.ones(3)
    )


def test_a_refused_update_leaves_the_residual_as_it_was(tmp_path: Path) -> None:
    residual = ErrorFeedback.load(tmp_path / "residual", "lineage")
    residual.record("a", torch.ones(3))
    residual.save()
    residual.record("a", torch.full((3,), 9.0))
    residual.stage()
    residual.discard()
    with pytest.raises(GymError, match="no staged residual") as caught:
        residual.commit()
    assert caught.value.code is ErrorCode.STATE_CORRUPT
    assert torch.equal(residual.compensated("a", torch.zeros(3)), torch.ones(3))


def test_an_encoding_that_came_to_nothing_leaves_no_trace_in_the_next(tmp_path: Path) -> None:
    residual = ErrorFeedback.load(tmp_path / "residual", SPEC.digest)
    encode_delta(update(0), BASE, CodecPolicy(), tmp_path / "1.gymdelta", SPEC, residual)
    encode_delta(
        {**BASE, "embed": update(1)["embed"]}, BASE, CodecPolicy(), tmp_path / "2.gymdelta", SPEC, residual
    )
    residual.save()
    assert residual.names() == ("embed",)


def test_a_tensor_that_lost_nothing_is_forgotten(tmp_path: Path) -> None:
    residual = ErrorFeedback.load(tmp_path / "residual", "lineage")
    residual.record("a", torch.ones(3))
    residual.record("b", torch.zeros(3))
    residual.save()
    assert residual.names() == ("a",)
    assert residual.norm() == pytest.approx(3**0.5)


def test_reset_forgets_everything(tmp_path: Path) -> None:
    residual = ErrorFeedback.load(tmp_path / "residual", "lineage")
    residual.record("a", torch.ones(3))
    residual.save()
    residual.reset()
    assert residual.names() == ()
    assert ErrorFeedback.load(tmp_path / "residual", "lineage").names() == ()


def test_a_residual_of_another_lineage_is_refused(tmp_path: Path) -> None:
    residual = ErrorFeedback.load(tmp_path / "residual", "sha256:one")
    residual.record("a", torch.ones(3))
    residual.save()
    with pytest.raises(GymError, match="lineage of sha256:one, not of sha256:two") as caught:
        ErrorFeedback.load(tmp_path / "residual", "sha256:two")
    assert caught.value.code is ErrorCode.BASE_MISMATCH


def test_a_residual_of_another_shape_is_refused(tmp_path: Path) -> None:
    residual = ErrorFeedback.load(tmp_path / "residual", "lineage")
    residual.record("a", torch.ones(3))
    residual.save()
    with pytest.raises(GymError, match="tensor 'a'") as caught:
        residual.compensated("a", torch.ones(4))
    assert caught.value.code is ErrorCode.BASE_MISMATCH


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "nan"])
def test_a_damaged_residual_is_refused(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "residual"
    residual = ErrorFeedback.load(path, "lineage")
    residual.record("a", torch.full((3,), float("nan")) if damage == "nan" else torch.ones(3))
    staged = residual.stage(path)
    data = staged.read_bytes()
    path.write_bytes({"cut": data[:-2], "empty": b"", "text": b"not a residual at all", "nan": data}[damage])
    with pytest.raises(GymError, match=str(path)) as caught:
        ErrorFeedback.load(path, "lineage")
    assert caught.value.code is ErrorCode.STATE_CORRUPT
