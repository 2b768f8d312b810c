"""Commands take a GGUF file where they take a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.base.models import is_hub_name, load_model, model_name, nano_path, resolve
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec
from tests.support.gguf_files import write_gguf

pytestmark = pytest.mark.usefixtures("warm_children")

pytest.importorskip("gguf", reason="the extra export is not installed")


@pytest.fixture(scope="module")
def nano_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """gym-nano in a GGUF file of float32."""
    return write_gguf(nano_path(), tmp_path_factory.mktemp("nano") / "nano.gguf")


def gym(*words: str | Path) -> None:
    from gym_fed.cli.main import app

    app([str(word) for word in words], standalone_mode=False)


def test_a_folder_with_one_file_leads_to_it_and_with_several_names_them(
    nano_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "downloaded"
    folder.mkdir()
    (folder / "a.gguf").write_bytes(nano_file.read_bytes())
    assert resolve(str(folder)) == resolve(str(nano_file))
    (folder / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(GymError, match=r"contains 2 GGUF files: a\.gguf, b\.gguf") as caught:
        resolve(str(folder))
    assert caught.value.code is ErrorCode.MODEL_INVALID


def test_a_file_that_is_not_there_is_no_name_of_the_hub() -> None:
    assert not is_hub_name("absent.gguf")
    with pytest.raises(GymError, match=r"absent\.gguf: no such file") as caught:
        resolve("absent.gguf")
    assert caught.value.code is ErrorCode.MODEL_NOT_FOUND


def test_its_base_digest_is_that_of_the_folder_and_its_name_no_path(nano_file: Path) -> None:
    one, other = (BaseSpec.of(load_model(name).model, "base") for name in ("gym-nano", str(nano_file)))
    assert one.digest == other.digest
    assert model_name(str(nano_file)) == "nano.gguf"


def test_chat_answers_as_the_model_that_it_was_made_of(
    nano_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    answers = []
    for name in ("gym-nano", nano_file):
        gym("chat", name, "--prompt", "double: abc")
        answers.append(capfd.readouterr().out)
    assert answers[0] == answers[1] != ""


def test_an_adapter_of_a_file_names_it_and_is_merged(
    nano_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gym_fed.config.train.training import TrainingConfig
    from gym_fed.config.yaml.file import load_config
    from gym_fed.training.trainer import Trainer

    monkeypatch.chdir(nano_file.parent)
    row: dict[str, Any] = {
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    }
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 8)
    config = tmp_path / "run.yaml"
    config.write_text(
        f"model: nano.gguf\nfinetuning: lora\nmax_steps: 2\nsave_steps: 1\noutput_dir: {tmp_path / 'run'}\n"
        f"data: [{{path: {tmp_path / 'rows.jsonl'}}}]\n"
    )
    Trainer(load_config(config, TrainingConfig)).train()
    named = json.loads((tmp_path / "run" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == str(nano_file)
    monkeypatch.chdir(tmp_path)
    adapted = load_model(str(tmp_path / "run")).model
    gym("export", tmp_path / "run", "-o", tmp_path / "merged", "--skip-check")
    merged = load_model(str(tmp_path / "merged")).model
    ids = torch.arange(40, 60)[None]
    with torch.no_grad():
        assert torch.allclose(adapted(ids).logits, merged(ids).logits, atol=1e-3)
        assert not torch.allclose(adapted(ids).logits, load_model("gym-nano").model(ids).logits, atol=1e-6)
