"""A hub's round either leads to what PEFT computes with the factors that were sent, or is refused by option's name."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch
from gym_quant.registry import get_codec
from gym_server.cli.main import app as server
from peft import LoraConfig, get_peft_model
from typer.testing import CliRunner

from gym_fed.config.hub.server import ServerConfig
from gym_fed.config.hub.task import LoraRecipe
from gym_fed.config.yaml.file import validate
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.file import DeltaFile
from tests.support.adapters import logits, sibling
from tests.support.federation import CONFIG, Federation
from tests.support.hub import HubProcess
from tests.support.peft_adapters import ADAPTERS, plain
from tests.support.quick import quick

LAYERS = ["q_proj", "v_proj"]
ROUNDS: dict[str, dict[str, Any]] = {
    "layers by name": {"target_modules": LAYERS},
    "one matrix of factors": {"target_modules": LAYERS, "freeze_a": True},
    "all linear": {"target_modules": "all-linear", "lora_dropout": 0.1},
}
"""Settings of ``recipe.lora`` that a hub accepts, for a base with a head of its own."""


def refused(settings: dict[str, Any]) -> str:
    """The reason why a hub refuses these settings of ``recipe.lora``; empty if it accepts them."""
    recipe = {"finetuning": "lora", "lora": settings}
    try:
        validate({"base_model": "gym-nano", "recipe": recipe}, ServerConfig, "gym-server.yaml")
    except GymError as error:
        return error.message
    return ""


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_option_of_peft_that_rounds_do_not_train_is_refused_by_name_before_anything_is_trained(
    name: str,
) -> None:
    settings = ADAPTERS[name]
    unknown = [key for key in settings if key not in LoraRecipe.model_fields]
    pattern = isinstance(settings.get("target_modules"), str) and settings["target_modules"] != "all-linear"
    reason = refused(settings)
    assert bool(reason) is bool(unknown or pattern)
    for key in [*unknown, *(["target_modules"] if pattern else [])]:
        assert f"recipe.lora.{key}: " in reason


@pytest.mark.parametrize(
    ("tied", "target"), [(False, "embed_tokens"), (True, "lm_head"), (False, "lm_head"), (False, "router")]
)
def test_a_layer_whose_factors_cannot_be_trained_or_sent_is_refused_before_a_round_opens(
    tied: bool, target: str, tmp_path: Path
) -> None:
    base = sibling("Llama", tmp_path / "base", tie_word_embeddings=tied)
    recipe = {"finetuning": "lora", "lora": {"target_modules": ["q_proj", target]}}
    hub = HubProcess(tmp_path / "hub", {"recipe": recipe}, str(base))
    error = CliRunner().invoke(server, ["run", "--check", "--dir", str(hub.folder)]).exception
    assert isinstance(error, GymError)
    assert error.code is ErrorCode.CONFIG_INVALID
    assert f"recipe.lora.target_modules: contains {target!r}" in error.message


@pytest.mark.parametrize("name", quick(ROUNDS, "layers by name"))
def test_the_version_after_a_round_of_one_contributor_computes_what_peft_computes(
    name: str, tmp_path: Path
) -> None:
    lora = {"r": 4, "lora_alpha": 9, **ROUNDS[name]}
    assert not refused(lora)
    base = sibling("Llama", tmp_path / "base", tie_word_embeddings=False, attention_bias=True)
    recipe = {**CONFIG["recipe"], "finetuning": "lora", "lora": lora, "learning_rate": 0.05}
    rounds = {**CONFIG["rounds"], "num_rounds": 1, "min_contributors": 1}
    federation = Federation(tmp_path, base, rounds=rounds, recipe=recipe)
    try:
        federation.hub.start("--exit-when-done")
        federation.join("ann")
        federation.finish()
        federation.hub.ask("model", str(tmp_path / "merged"))
    finally:
        federation.close()
    with DeltaFile.open(sent_by_ann(federation)) as update:
        wanted = logits(with_factors(base, update))
    before = logits(plain(base))
    assert (wanted - before).norm() > 0.01 * before.norm()
    assert (logits(plain(tmp_path / "merged")) - wanted).norm() <= 0.01 * (wanted - before).norm()


def sent_by_ann(federation: Federation) -> Path:
    """The file that the contributor signed and sent."""
    with contextlib.closing(sqlite3.connect(federation.hub.folder / "hub.db")) as database:
        ((sha256,),) = database.execute(
            "SELECT delta_sha256 FROM updates WHERE verdict = 'merged'"
        ).fetchall()
    (path,) = (federation.hub.folder / "objects").rglob(sha256)
    return path


def with_factors(base: Path, update: DeltaFile) -> Any:
    """The base with the update's factors as an adapter of PEFT, of scaling 1."""
    names = [name.removesuffix(".weight") for name in update.names]
    rank = max(int(update.record(name).params["rank"]) for name in update.names)
    model = get_peft_model(plain(base), LoraConfig(r=rank, lora_alpha=rank, target_modules=names))
    for name in update.names:
        record, layer = (
            update.record(name),
            model.base_model.model.get_submodule(name.removesuffix(".weight")),
        )
        codec = get_codec(record.codec)
        factors = codec.factors(update.payload(name), record.shape, record.params)
        assert factors is not None
        with torch.no_grad():
            layer.lora_A["default"].weight.copy_(factors[0])
            layer.lora_B["default"].weight.copy_(codec.scaling(record.params) * factors[1])
    return model
