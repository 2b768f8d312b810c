"""Python files that a hostile model names are never run, and not named by any export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer

from gym_fed.base.models import load_tokenizer, nano_path
from gym_fed.core.errors import GymError
from gym_fed.export.gguf.convert import _forbid_remote_code
from gym_fed.export.source import Source, licences_of


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """gym-nano's tokenizer and config, which name a Python file that leaves a trace."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    for name in ("config.json", "tokenizer_config.json"):
        values = json.loads((nano_path() / name).read_text())
        values["auto_map"] = {
            "AutoTokenizer": [f"{folder}--code.Own"] * 2,
            "AutoConfig": f"{folder}--code.Own",
        }
        (folder / name).write_text(json.dumps(values))
    shutil.copyfile(nano_path() / "tokenizer.json", folder / "tokenizer.json")
    (folder / "code.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
        "from transformers import PreTrainedTokenizerFast\n"
        "class Own(PreTrainedTokenizerFast): pass\n"
    )
    return folder


def test_files_beside_an_export_do_not_name_the_code_of_its_source(hostile: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    shutil.copyfile(hostile / "config.json", out / "config.json")  # as a model's save_pretrained writes it
    Source("hostile", None, load_tokenizer(str(hostile)), None, folders=[hostile]).write_companions(out)
    for name in ("config.json", "tokenizer_config.json"):
        assert "auto_map" not in json.loads((out / name).read_text())
        assert str(hostile) not in (out / name).read_text()
    assert AutoTokenizer.from_pretrained(out).vocab_size == load_tokenizer(str(nano_path())).vocab_size


def test_a_converter_that_trusts_a_models_code_does_not_run_it(
    hostile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    for kind in (AutoConfig, AutoTokenizer):
        monkeypatch.setattr(kind, "from_pretrained", kind.from_pretrained)  # put back after the test
    _forbid_remote_code()
    tokenizer = AutoTokenizer.from_pretrained(hostile, trust_remote_code=True)
    assert AutoConfig.from_pretrained(hostile, trust_remote_code=True).model_type == "qwen3"
    assert tokenizer.encode("a")
    assert not (tmp_path / "ran").exists()


def test_a_licence_of_gigabytes_is_refused_by_name(tmp_path: Path) -> None:
    with (tmp_path / "LICENSE").open("wb") as file:
        file.truncate(1 << 33)
    with pytest.raises(GymError, match=r"LICENSE: the licence file has 8\.59 GB"):
        licences_of(Source("hostile", None, None, None, folders=[tmp_path]))
