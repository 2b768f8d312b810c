"""Whatever PEFT trained, a delta, a soup, an export and a variant of it compute what PEFT computes, or are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from gym_fed.base.models import load_model
from gym_fed.cli.main import app
from gym_fed.config.hub.soup import DeltaSoupConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import model_tensors
from gym_fed.delta.factors import is_plain_lora, lora_factors
from gym_fed.delta.file import DeltaFile
from gym_fed.export.formats.base import Options
from gym_fed.export.run import export
from gym_fed.export.source import open_source
from gym_fed.quantization.config import CalibratedPolicy
from gym_fed.quantization.quantizer import Quantizer
from gym_fed.soup.delta_soup import DeltaSoup
from tests.support.adapters import logits, run, sibling
from tests.support.peft_adapters import ADAPTERS, made, plain
from tests.support.quick import quick

EXACTLY: dict[str, Any] = {"dense_dtype": "float32", "factors": "float32"}
QUICK = {"distill_steps": 0, "calibration_samples": 0}
OWN_HEAD = {"head saved", "embeddings and head saved", "embeddings", "head"}
"""On a tied base these give the head weights of its own, which no delta of the base holds."""
NO_FACTORS = {"dora", "parameters"}
BEYOND_FACTORS = NO_FACTORS | {
    "bias",
    "head saved",
    "embeddings and head saved",
    "embeddings",
    "embeddings and head tied",
    "single tokens",
    "saved norms",
}
EXACT, ROUNDED = 1e-4, 0.03
"""Share of the change in the logits that may be lost, in float32 and with factors or differences in bfloat16."""


TIED = "tied: "
"""Prefix of a case whose base has a tied head."""
QUICKLY_TIED = {*OWN_HEAD, "embeddings and head tied", "bias"}
"""Adapters that the quick suite also tries on a tied base: those of its head, and one that does not touch it."""
RARE = {"eva", "olora"}
"""Adapters that only the full suite tries: plain LoRA as "gaussian", and converted ones as "pissa"."""
CASES = quick(
    [*ADAPTERS, *(TIED + name for name in ADAPTERS)],
    *(name for name in ADAPTERS if name not in RARE),
    *(TIED + name for name in QUICKLY_TIED),
)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """A base with a head of its own and one whose head is tied, by whether it is tied."""
    root = tmp_path_factory.mktemp("bases")
    return {
        tied: sibling("Llama", root / str(tied), tie_word_embeddings=tied, attention_bias=True)
        for tied in (False, True)
    }


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tied(case: str) -> bool:
    return case.startswith(TIED)


@pytest.fixture(scope="module")
def base(tied: bool, bases: dict[bool, Path]) -> Path:
    return bases[tied]


@pytest.fixture(scope="module")
def adapter(
    case: str, base: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, torch.Tensor]:
    """The option's name, the folder that PEFT wrote, and the logits of PEFT."""
    folder = tmp_path_factory.mktemp("contract") / "adapter"
    name = case.removeprefix(TIED)
    return name, folder, made(base, folder, **ADAPTERS[name])


def lost(found: torch.Tensor, wanted: torch.Tensor, base: Path) -> float:
    """What is lost of the adapter's own effect on the logits."""
    return float((found - wanted).norm() / (wanted - logits(plain(base))).norm())


@pytest.mark.few(8, "one export for every adapter")
def test_export_computes_what_peft_computes(
    adapter: tuple[str, Path, torch.Tensor], base: Path, tmp_path: Path
) -> None:
    _, folder, wanted = adapter
    export(open_source(str(folder)), "huggingface", tmp_path / "whole", Options(dtype="float32"), check=False)
    assert lost(logits(plain(tmp_path / "whole")), wanted, base) <= EXACT


@pytest.mark.few(16, "one encoder for every adapter")
@pytest.mark.parametrize("codec", ["lora", "dense", pytest.param("compact", marks=pytest.mark.slow)])
def test_delta_encode_keeps_all_that_peft_trained_or_refuses_it(
    adapter: tuple[str, Path, torch.Tensor], base: Path, tied: bool, tmp_path: Path, codec: str
) -> None:
    name, folder, wanted = adapter
    exact: dict[str, Any] = {"max_error": 0.0} if codec == "compact" else EXACTLY
    policy = CalibratedPolicy(codec=codec, **exact, **QUICK)  # type: ignore[arg-type]
    out = tmp_path / "new.gymdelta"
    refused = (tied and name in OWN_HEAD) or (codec == "lora" and name in NO_FACTORS)
    if refused:
        with pytest.raises(GymError, match=r"has its own output head|single product of LoRA factors"):
            Quantizer(policy).quantize(str(base), str(folder), out=out, progress=False)
        assert not out.exists()
        return
    report = Quantizer(policy).quantize(str(base), str(folder), out=out, progress=False)
    assert lost(logits(Quantizer.apply(plain(base), out)), wanted, base) <= EXACT
    assert max(tensor.error for tensor in report.tensors) <= EXACT


@pytest.mark.few(8, "one engine for every adapter")
def test_a_variant_computes_what_peft_computes(
    adapter: tuple[str, Path, torch.Tensor], base: Path, tied: bool, tmp_path: Path
) -> None:
    name, folder, wanted = adapter
    if (tied and name in OWN_HEAD) or name in NO_FACTORS:
        pytest.skip("no factors of this base, which the test of delta encode shows")
    file, store = tmp_path / "v.gymdelta", tmp_path / "variants"
    words = ["delta", "encode", str(base), str(folder), "-o", str(file), "--codec", "lora", "--json"]
    CliRunner().invoke(app, words, catch_exceptions=False)
    words = ["variant", "add", str(file), "--unsigned", "--user", "ana", "--variants", str(store)]
    added = CliRunner().invoke(app, words, catch_exceptions=False)
    assert added.exit_code == 0, added.output
    served = open_source(str(base), variant="v", variants=store)
    assert lost(logits(served.model), wanted, base) <= ROUNDED


@pytest.mark.few(8, "one round for every adapter")
def test_a_round_of_one_update_leads_to_what_peft_computes_or_refuses_the_update(
    adapter: tuple[str, Path, torch.Tensor], base: Path, tied: bool
) -> None:
    name, folder, wanted = adapter
    soup = DeltaSoup(DeltaSoupConfig(base_model=str(base)))
    if tied and name in OWN_HEAD:
        with pytest.raises(GymError, match="has its own output head") as caught:
            soup.contribute(user_id="ana", model=str(folder))
        assert caught.value.code is ErrorCode.BASE_MISMATCH
        return
    soup.contribute(user_id="ana", model=str(folder))
    model = plain(base)
    soup.aggregate(min_contributors=1).apply(model)
    assert lost(logits(model), wanted, base) <= ROUNDED


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga"])
def test_an_adapter_of_a_base_that_its_initialisation_changed_is_refused_by_name(
    start: str, bases: dict[bool, Path], tmp_path: Path
) -> None:
    made(bases[False], tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "init_lora_weights": start}))
    out = tmp_path / "new.gymdelta"
    for take in (
        lambda: Quantizer().quantize(str(bases[False]), str(tmp_path / "adapter"), out=out, progress=False),
        lambda: open_source(str(tmp_path / "adapter")),
        lambda: DeltaSoup(DeltaSoupConfig(base_model=str(bases[False]))).contribute(
            user_id="ana", model=str(tmp_path / "adapter")
        ),
    ):
        with pytest.raises(GymError, match=f"init_lora_weights is {start}"):
            take()
    assert not out.exists()


def test_what_gym_train_changed_in_norms_and_embeddings_is_in_the_delta(
    tmp_path: Path, bases: dict[bool, Path]
) -> None:
    base = bases[True]
    run(tmp_path / "run", model=str(base), finetuning="full")
    wanted, old = (model_tensors(load_model(str(m)).model) for m in (tmp_path / "run", base))
    beyond = [name for name in old if "norm" in name or "embed" in name]
    assert beyond
    assert all(bool((wanted[name] != old[name]).any()) for name in beyond)
    for words in ((), ("--codec", "lora", "--rank", "16", "--set", "embeddings=dense")):
        out = tmp_path / "new.gymdelta"
        command = ["delta", "encode", str(base), str(tmp_path / "run"), "-o", str(out), "--overwrite", *words]
        done = CliRunner().invoke(app, [*command, "--json"], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        with DeltaFile.open(out) as delta:
            for name in beyond:
                change = wanted[name] - old[name]
                assert (delta.decode(name) - change).norm() <= 0.01 * change.norm(), (words, name)
        model = Quantizer.apply(plain(base), out)
        assert lost(logits(model), logits(tmp_path / "run"), base) <= ROUNDED


def test_factors_alone_are_taken_only_of_an_adapter_that_has_nothing_else(
    adapter: tuple[str, Path, torch.Tensor],
) -> None:
    name, folder, _ = adapter
    model = load_model(str(folder)).model
    assert is_plain_lora(model) is (name not in BEYOND_FACTORS)
    if name in BEYOND_FACTORS:
        with pytest.raises(GymError, match="changes more than LoRA factors"):
            lora_factors(model)
    else:
        assert lora_factors(model)
