"""One encoder: the command, the Python faces and a contributor's policy write the same bytes, in any codec."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from gym_quant.codec import Codec, Encoded, Params, Payload, Shape, as_matrix, only_known
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from gym_fed.base.models import load_model, model_name
from gym_fed.cli.main import app
from gym_fed.config.delta import CodecPolicy
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.encode import encode_delta
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.policy import parts_of
from gym_fed.personalization.recipe import encoding_of
from gym_fed.quantization import (
    BitDeltaConfig,
    BitDeltaQuantizer,
    CalibratedPolicy,
    DeltaQuantConfig,
    DeltaQuantizer,
    Quantizer,
    QuantMethod,
)
from tests.support.fine_tunes import save_noisy_copy
from tests.support.installed import install

MODELS = Path(__file__).resolve().parents[3].parent / "shared" / "models"


class Halves(Codec):
    """The codec of another package, with nothing but what is abstract: values in float16."""

    name = "halves"

    def normalise(self, params: Mapping[str, Any], shape: Shape) -> Params:
        only_known(params, (), self.name)
        return {}

    def payload_spec(self, shape: Shape, params: Params) -> dict[str, tuple[torch.dtype, Shape]]:
        return {"halves": (torch.float16, as_matrix(shape))}

    def encode(self, tensor: Tensor, **params: Any) -> Encoded:
        return Encoded({}, {"halves": tensor.detach().cpu().half().reshape(as_matrix(tuple(tensor.shape)))})

    def decode_rows(self, payload: Payload, shape: Shape, params: Params, start: int, stop: int) -> Tensor:
        return payload["halves"][start:stop].float()

    def check(self, payload: Payload, shape: Shape, params: Params) -> None: ...

    def norm(self, payload: Payload, shape: Shape, params: Params) -> float:
        return float(payload["halves"].double().norm())


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Path:
    path = tmp_path_factory.mktemp("one-encoder")
    save_noisy_copy(tiny_base, path)
    return path


def encoded(base: Path, tuned: Path, out: Path, *words: str) -> dict[str, Any]:
    done = CliRunner().invoke(
        app, ["delta", "encode", str(base), str(tuned), "-o", str(out), "--json", *words]
    )
    assert done.exit_code == 0, done.exception
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def contributed(base: Path, tuned: Path, out: Path, **values: Any) -> str:
    old, new = load_model(str(base)).model, load_model(str(tuned)).model
    policy = CodecPolicy(error_feedback=False, **values)
    return encode_delta(new, old, policy, out, BaseSpec.of(old, model_name(str(base)))).sha256


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"group_size": "row", "embeddings": "int8", "scale_dtype": "bfloat16", "small_tensors": "int8"},
        {"codec": "int4"},
        {"codec": "ternary", "group_size": "tensor", "symmetric": False},
    ],
    ids=str,
)
def test_one_fine_tune_has_the_same_bytes_by_command_by_face_and_by_a_contributors_policy(
    tiny_base: Path, tuned: Path, tmp_path: Path, values: dict[str, Any]
) -> None:
    named = {"codec": "bitdelta", **values}
    settings = [word for key, value in named.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    digests = {encoded(tiny_base, tuned, tmp_path / "command", *settings)["sha256"]}
    renamed = {"small_tensors": "norms"}
    words = {renamed.get(key, key): value for key, value in values.items() if key != "codec"}
    if words.get("group_size") == "tensor":
        words = {**words, "group_size": None, "per_channel": False}
    face: Quantizer
    if "codec" in values:
        method = QuantMethod(values["codec"])
        face = DeltaQuantizer(DeltaQuantConfig(method=method, calibration_samples=0, **words))
    else:
        face = BitDeltaQuantizer(BitDeltaConfig(distill_steps=0, **words))
    digests.add(face.quantize(str(tiny_base), str(tuned), out=tmp_path / "face").sha256)
    ends = {"head": values["embeddings"]} if "embeddings" in values else {}
    digests.add(contributed(tiny_base, tuned, tmp_path / "round", **values, **ends))
    assert len(digests) == 1


def test_faces_and_a_contributors_policy_have_the_same_defaults_and_a_single_file_is_compact() -> None:
    wanted = CodecPolicy(error_feedback=False).model_dump()
    keys = CodecPolicy.model_fields.keys()
    assert CalibratedPolicy().model_dump(include=keys) == {**wanted, "codec": "compact"}
    assert BitDeltaConfig(distill_steps=0).policy().model_dump(include=keys) == wanted
    grid = DeltaQuantConfig(method=QuantMethod.INT8).policy().model_dump(include=keys)
    assert grid == {**wanted, "codec": "int8"}


def test_a_codec_of_another_package_is_one_in_policies_commands_and_variants(
    tiny_base: Path, tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, {"gym_fed.codecs": {"halves": f"{__name__}:Halves"}})
    out = tmp_path / "d.gymdelta"
    assert encoded(tiny_base, tuned, out, "--codec", "halves", "--overwrite")["size_bytes"] > 0
    spec = BaseSpec.of(load_model(str(tiny_base)).model, "tiny")
    with DeltaFile.open(out, spec) as delta:
        large = [delta.record(name) for name in delta.names if math.prod(delta.record(name).shape) > 256]
    assert {record.codec for record in large} == {"halves"}
    contributed(tiny_base, tuned, out, embeddings="halves")
    with DeltaFile.open(out, spec) as delta:
        assert sorted({delta.record(name).codec for name in delta.names}) == ["bitdelta", "dense", "halves"]
    policy = encoding_of("full", "halves", None, spec).policy
    assert (policy.codec, policy.distill_steps) == ("halves", 0)
    with pytest.raises(ValueError, match="group_size and scale_dtype apply only to codecs with scales"):
        CodecPolicy(codec="halves", group_size="row")
    menu = {"codec": "auto", "max_bits_per_weight": 20.0, "menu": ("halves",), "calibration_samples": 0}
    report = Quantizer(CalibratedPolicy(**menu)).quantize(str(tiny_base), str(tuned), out=out)
    assert {t.codec for t in report.tensors if t.energy > 0} == {"halves", "dense"}


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "llama-tied": {"tie_word_embeddings": True},
    "gpt2": {},
    "gpt_neox": {},
    "qwen2": {},
    "mistral": {},
    "gemma": {},
    "phi": {},
    "opt": {},
    "bloom": {},
    "falcon": {},
    "mixtral": {},
}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_embeddings_and_head_are_the_same_by_the_model_and_by_the_names(kind: str) -> None:
    config = AutoConfig.for_model(kind.removesuffix("-tied"), **ARCHITECTURES[kind])
    for layers in ("num_hidden_layers", "n_layer", "num_layers"):
        if hasattr(config, layers):
            setattr(config, layers, 1)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    by_model = parts_of(shapes, model)
    assert by_model == parts_of(shapes)
    assert "embeddings" in by_model.values()
    if kind == "llama":
        assert by_model["lm_head.weight"] == "head"
    if kind == "llama-tied":
        assert "head" not in by_model.values()


@pytest.mark.shared
@pytest.mark.skipif(not MODELS.is_dir(), reason="the models of the team's shared folder are absent")
def test_parts_of_the_stored_models_are_the_same_by_the_model_and_by_the_names() -> None:
    found = [path for path in sorted(MODELS.iterdir()) if (path / "config.json").is_file()]
    assert found
    for path in found:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        assert parts_of(shapes, model) == parts_of(shapes), path


def test_the_model_decides_what_is_an_embedding_where_the_names_cannot() -> None:
    model = torch.nn.ModuleDict({"table": torch.nn.Embedding(8, 4), "embed_like": torch.nn.Linear(4, 4)})
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert parts_of(shapes)["table.weight"] == "body"
    assert parts_of(shapes, model) == {
        "table.weight": "embeddings",
        "embed_like.weight": "body",
        "embed_like.bias": "body",
    }


def test_a_budget_without_a_residual_writes_every_tensor(
    tiny_base: Path, tuned: Path, tmp_path: Path
) -> None:
    policy = CalibratedPolicy(codec="auto", max_bits_per_weight=6.0, calibration_samples=0)
    report = Quantizer(policy).quantize(str(tiny_base), str(tuned), out=tmp_path / "d")
    assert report.bits_per_weight <= 6.0
    assert all(tensor.codec is not None for tensor in report.tensors)
    assert len({tensor.codec for tensor in report.tensors}) > 2
