"""Server optimisers between rounds: what their state holds, whose it is, and what cannot become a state."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import SERVER_OPTIMIZERS
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.encode import encode_delta
from gym_fed.delta.file import DeltaFile
from gym_fed.soup.building import build_optimizer
from gym_fed.soup.merging import merge
from gym_fed.soup.optimizer import OptimizerState

EXACT = CodecPolicy(codec="dense", dense_dtype="float32", error_feedback=False)
BASE = {"a": torch.zeros(4, 8), "b": torch.zeros(4, 8)}
SPEC = BaseSpec.of(BASE, "base")


def recipe(optimizer: str, **options: float) -> SoupRecipe:
    return SoupRecipe(server_optimizer=optimizer, server_optimizer_options=options, codec=EXACT)


def rule(chosen: SoupRecipe) -> str:
    optimizer = build_optimizer(chosen)
    assert optimizer is not None
    return optimizer.rule


def soup_of(
    folder: Path, update: Mapping[str, Tensor], chosen: SoupRecipe, state: OptimizerState
) -> dict[str, Tensor]:
    """The soup of one contributor's update, decoded; a tensor that is left out is zero."""
    tuned = {name: BASE[name] + update.get(name, 0.0) for name in BASE}
    encode_delta(tuned, BASE, EXACT, folder / "update.gymdelta", SPEC)
    with DeltaFile.open(folder / "update.gymdelta", SPEC) as sent:
        assert set(sent.names) == {name for name in BASE if name in update}
        merge([sent], [1.0], chosen, folder / "soup.gymdelta", SPEC, optimizer_state=state)
    with DeltaFile.open(folder / "soup.gymdelta", SPEC) as soup:
        return {name: soup.decode(name) if name in soup else torch.zeros(4, 8) for name in BASE}


@pytest.mark.parametrize("name", ["adam", "yogi"])
def test_an_aggregate_whose_square_overflows_is_refused_before_anything_could_be_staged(
    name: str, tmp_path: Path
) -> None:
    state = OptimizerState()
    with pytest.raises(GymError, match="tensor 'a': the server optimiser's moment 'v' overflows") as caught:
        soup_of(tmp_path, {"a": torch.full((4, 8), 1e20)}, recipe(name), state)
    assert caught.value.code is ErrorCode.UPDATE_REFUSED
    assert not (tmp_path / "soup.gymdelta").exists()
    soup = soup_of(tmp_path, {"a": torch.ones(4, 8)}, recipe(name), state)
    assert float(soup["a"].abs().sum()) > 0


@pytest.mark.parametrize("name", sorted(SERVER_OPTIMIZERS.names()))
def test_a_state_that_was_staged_and_loaded_again_goes_on_as_the_one_in_memory(
    name: str, tmp_path: Path
) -> None:
    chosen, path = recipe(name), tmp_path / "state"
    state = OptimizerState(rule=rule(chosen))
    soup_of(tmp_path, {"a": torch.ones(4, 8), "b": torch.ones(4, 8)}, chosen, state)
    state.stage(path, SPEC.digest)
    state.advance()
    loaded = OptimizerState.load(path, SPEC.digest, rule(chosen))
    assert loaded.step == state.step == 2
    later = {"a": torch.full((4, 8), 2.0)}
    on_disk, in_memory = (soup_of(tmp_path, later, chosen, s) for s in (loaded, state))
    assert all(torch.equal(on_disk[tensor], in_memory[tensor]) for tensor in BASE)


@pytest.mark.parametrize(
    "then",
    [recipe("adam"), recipe("momentum", momentum=0.5)],
    ids=["another optimiser", "another setting"],
)
def test_the_moments_of_another_rule_are_not_begun_from(
    then: SoupRecipe, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, path = recipe("momentum"), tmp_path / "state"
    state = OptimizerState(rule=rule(before))
    soup_of(tmp_path, {"a": torch.ones(4, 8)}, before, state)
    state.stage(path, SPEC.digest)
    with caplog.at_level(logging.WARNING, logger="gym_fed"):
        loaded = OptimizerState.load(path, SPEC.digest, rule(then))
    assert f"contains the moments of {rule(before)}; {rule(then)} starts from zero" in caplog.text
    assert (loaded.step, loaded.tensors()) == (1, ())
    update = {"a": torch.full((4, 8), 3.0)}
    fresh = soup_of(tmp_path, update, then, OptimizerState())
    assert torch.equal(soup_of(tmp_path, update, then, loaded)["a"], fresh["a"])


def test_nesterov_takes_the_steps_of_torchs_sgd_with_nesterov(tmp_path: Path) -> None:
    chosen, weights = recipe("nesterov", momentum=0.9), torch.zeros(4, 8, requires_grad=True)
    peer = torch.optim.SGD([weights], lr=1.0, momentum=0.9, nesterov=True)
    state, total = OptimizerState(rule=rule(chosen)), torch.zeros(4, 8)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        update = torch.randn(4, 8, generator=generator)
        total += soup_of(tmp_path, {"a": update}, chosen, state)["a"]
        state.advance()
        weights.grad = -update
        peer.step()
    torch.testing.assert_close(total, weights.detach())


@pytest.mark.parametrize("name", sorted(SERVER_OPTIMIZERS.names()))
def test_a_tensor_that_nobody_sends_steps_as_one_that_is_sent_as_zero(name: str, tmp_path: Path) -> None:
    chosen, state = recipe(name), OptimizerState()
    soup_of(tmp_path, {"a": torch.ones(4, 8), "b": torch.ones(4, 8)}, chosen, state)
    state.advance()
    optimizer, alone = build_optimizer(chosen), OptimizerState()
    assert optimizer is not None
    optimizer.step("b", torch.ones(4, 8), alone)
    alone.advance()
    expected = optimizer.step("b", torch.zeros(4, 8), alone)
    soup = soup_of(tmp_path, {"a": torch.ones(4, 8)}, chosen, state)
    assert float(expected.abs().sum()) > 0
    torch.testing.assert_close(soup["b"], expected)
    if name == "momentum":
        torch.testing.assert_close(soup["b"], torch.full((4, 8), 0.9))
