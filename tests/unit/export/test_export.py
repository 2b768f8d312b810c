"""Exported models: contents, accompanying files, comparison with the source, and refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from gym_fed.base.models import load_model
from gym_fed.cli.main import app
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.export.checking import ReadBack, compared, effect_kept
from gym_fed.export.formats.base import Options, Tolerance
from gym_fed.export.readers.reading import GREEDY_TOKENS, answers
from gym_fed.export.readers.transformers import load, loaded
from gym_fed.export.run import export
from gym_fed.export.source import open_source
from tests.support.adapters import logits, run, sibling
from tests.support.quick import quick
from tests.support.siblings import make_sibling


@pytest.fixture(scope="module", params=quick(["Qwen3", "Llama", "Qwen3Moe"], "Qwen3", "Qwen3Moe"))
def tuned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base with a licence, and runs ``first`` and, on that merged, ``second``."""
    folder = tmp_path_factory.mktemp(request.param)
    base = sibling(request.param, folder / "base")
    (base / "LICENSE").write_text("Apache-2.0")
    run(folder / "first", model=str(base))
    run(folder / "second", model=str(base), adapter=str(folder / "first"), new_adapter=True)
    return folder


def test_merged_adapters_compute_what_they_did_beside_the_base(tuned: Path, tmp_path: Path) -> None:
    for name in ("first", "second"):
        source = open_source(str(tuned / name))
        export(source, "huggingface", tmp_path / name, Options(), check=False)
        torch.testing.assert_close(logits(tmp_path / name), logits(tuned / name), rtol=0, atol=2e-6)
        assert not (tmp_path / name / "adapter_config.json").exists()
    assert (logits(tmp_path / "first") - logits(tmp_path / "second")).abs().max() > 1e-4


def test_what_is_read_back_in_a_fresh_process_is_what_was_written(tiny_base: Path, tmp_path: Path) -> None:
    run(tmp_path / "run", model=str(tiny_base))
    options = Options(dtype="bfloat16", shard_size="5KB")
    record = export(open_source(str(tmp_path / "run")), "huggingface", tmp_path / "out", options)
    assert record["check"]["read_back"]["max"] == 0
    assert record["check"]["read_back"]["same_greedy_tokens"] is True
    assert 0 < record["check"]["against_the_source"]["max"] < 2**-6
    assert json.loads((tmp_path / "out/export.json").read_text()) == record
    shards = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(shards) > 1
    assert all(value.dtype is torch.bfloat16 for file in shards for value in load_file(file).values())


@pytest.mark.parametrize(
    ("factor", "says"),
    [(1.001, "reads back logits that are up to"), (1 + 1e-6, "reads back different weights")],
)
def test_an_export_that_computes_something_else_is_not_kept(
    factor: float, says: str, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(checking: ReadBack, parts: dict[str, Any], _: Path) -> dict[str, Any]:
        file = Path(parts["model"]) / "model.safetensors"
        tensors = load_file(file)
        tensors["model.norm.weight"] *= factor
        save_file(tensors, file, metadata={"format": "pt"})
        return answers(load(parts), checking._job(GREEDY_TOKENS))

    monkeypatch.setattr(ReadBack, "_in_a_fresh_process", changed)
    with pytest.raises(GymError, match=says) as caught:
        export(open_source(str(tiny_base)), "huggingface", tmp_path / "out", Options())
    assert caught.value.code is ErrorCode.EXPORT_DIFFERS
    assert list(tmp_path.iterdir()) == []


def test_other_token_ids_are_found() -> None:
    one = {"ids.0": torch.tensor([1, 2]), "logits.0": torch.zeros(2, 3), "greedy": torch.tensor([0])}
    assert compared(one, one)["same_token_ids"]
    assert compared(one, {**one, "ids.0": torch.tensor([1, 3])}) == {"same_token_ids": False}


def test_tokenizer_template_generation_config_and_licence_travel(tuned: Path, tmp_path: Path) -> None:
    (tuned / "first/chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    export(open_source(str(tuned / "first")), "huggingface", tmp_path / "out", Options(), check=False)
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"LICENSE", "config.json", "generation_config.json", "tokenizer.json", "export.json"} <= names
    found = load_model(str(tmp_path / "out")).tokenizer
    assert found.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"


def test_an_adapter_is_read_back_by_peft_with_what_it_stands_on(tuned: Path, tmp_path: Path) -> None:
    source = open_source(str(tuned / "second"))
    export(source, "adapter", tmp_path / "out", Options(), check=False)
    model, _ = loaded(
        {"model": str(tuned / "base"), "adapters": [*below(tmp_path / "out"), str(tmp_path / "out")]}
    )
    torch.testing.assert_close(logits(model), logits(tuned / "second"), rtol=0, atol=2e-6)


def below(folder: Path) -> list[str]:
    return [str(entry) for entry in sorted((folder / "base_adapters").iterdir())]


def test_adapters_are_put_on_in_the_order_of_the_options(tiny_base: Path, tmp_path: Path) -> None:
    run(tmp_path / "a", model=str(tiny_base))
    run(tmp_path / "b", model=str(tiny_base), seed=3)
    both = [str(tmp_path / "a"), str(tmp_path / "b")]
    export(open_source(str(tiny_base), both), "huggingface", tmp_path / "out", Options(), check=False)
    base, a, b = (load_model(str(folder)).model for folder in (tiny_base, *both))
    a, b = a.merge_and_unload(), b.merge_and_unload()
    found = load_model(str(tmp_path / "out")).model.state_dict()
    for name, value in base.state_dict().items():
        wanted = a.state_dict()[name] + b.state_dict()[name] - value
        torch.testing.assert_close(found[name], wanted, rtol=0, atol=1e-5)


def test_what_cannot_be_exported_is_refused_by_name(tiny_base: Path, tmp_path: Path) -> None:
    def refused(says: str, *words: str) -> None:
        result = CliRunner().invoke(app, ["export", *words])
        assert isinstance(result.exception, GymError)
        assert says in str(result.exception), str(result.exception)

    out = str(tmp_path / "out")
    refused("format zip is unknown", str(tiny_base), "-o", out, "--format", "zip")
    refused("--dtype 'int3' is unknown", str(tiny_base), "-o", out, "--dtype", "int3")
    refused("'5 of them' is not a size", str(tiny_base), "-o", out, "--shard-size", "5 of them")
    refused("has no adapter", str(tiny_base), "-o", out, "--format", "adapter")
    refused("exists", str(tiny_base), "-o", str(tmp_path))
    run(tmp_path / "run", model=str(tiny_base), max_steps=1)
    other = sibling("Qwen3", tmp_path / "other", seed=9)
    refused("has different weights", str(other), "--adapter", str(tmp_path / "run"), "-o", out)
    quantised = Path(shutil.copytree(tiny_base, tmp_path / "tiny-hqq"))
    config = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "hqq"}})
    )
    refused("quantised by hqq", str(quantised), "--adapter", str(tmp_path / "run"), "-o", out)
    assert not (tmp_path / "out").exists()


def test_the_command_says_what_was_found(tiny_base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["export", str(tiny_base), "-o", str(out), "--skip-check", "--json"])
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout[result.stdout.index("{") :])
    assert record["check"] is None
    assert record["output"] == str(out)
    torch.testing.assert_close(logits(out), logits(tiny_base), rtol=0, atol=0)


def test_an_export_from_a_folder_with_python_files_runs_none_of_them(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_base, folder)
    for name in ("torch", "transformers", "safetensors"):
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    monkeypatch.chdir(folder)
    export(open_source(str(folder)), "huggingface", tmp_path / "out", Options())
    assert not (tmp_path / "ran").exists()


def test_a_licence_that_is_a_link_out_of_its_folder_does_not_travel(tiny_base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_base, folder)
    (tmp_path / "id_rsa").write_text("private")
    (folder / "LICENSE").symlink_to(tmp_path / "id_rsa")
    (folder / "NOTICE").write_text("Made by us.")
    export(open_source(str(folder)), "huggingface", tmp_path / "out", Options(), check=False)
    assert not (tmp_path / "out/LICENSE").exists()
    assert (tmp_path / "out/NOTICE").read_text() == "Made by us."


def test_an_export_onto_a_link_that_leads_nowhere_is_refused(tiny_base: Path, tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(GymError) as raised:
        export(open_source(str(tiny_base)), "huggingface", tmp_path / "out", Options(), check=False)
    assert raised.value.code is ErrorCode.FILE_EXISTS
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_merged_folder_holds_the_bits_of_pefts_own_merge_and_what_its_base_had_beside_it(
    tmp_path: Path, dtype: str
) -> None:
    """Qwen3's form in bfloat16, with its tokenizer and template; nothing of ours computes what is compared with."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def plain(folder: Path, kind: Any = torch.float32) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=kind)

    base, adapter, out = make_sibling("qwen3", tmp_path / "base"), tmp_path / "adapter", tmp_path / "out"
    (base / "LICENSE").write_text("Apache-2.0")
    learning = get_peft_model(
        plain(base), LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    )
    torch.manual_seed(1)
    for value in learning.parameters():
        if value.requires_grad:
            torch.nn.init.normal_(value, std=0.2)
    learning.save_pretrained(str(adapter))
    export(open_source(str(adapter)), "huggingface", out, Options(dtype=dtype), check=False)
    wanted = PeftModel.from_pretrained(plain(base), str(adapter)).merge_and_unload().state_dict()
    found = plain(out, "auto").state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value.to(getattr(torch, dtype))) for name, value in wanted.items())
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (out, base))
    messages = [{"role": "user", "content": "Two  words, 你好"}]
    assert ours.chat_template == theirs.chat_template
    assert (
        ours.apply_chat_template(messages)["input_ids"] == theirs.apply_chat_template(messages)["input_ids"]
    )
    generation = [
        json.loads((folder / "generation_config.json").read_text()).items() for folder in (base, out)
    ]
    assert all(item in generation[1] for item in generation[0])
    assert (out / "LICENSE").read_text() == "Apache-2.0"


def test_the_share_of_a_deltas_effect_that_is_left_is_computed_where_the_same_positions_were_answered() -> (
    None
):
    base, tuned, written = ({"logits.0": torch.full((2, 3), value)} for value in (0.0, 2.0, 1.5))
    assert effect_kept(base, tuned, written) == pytest.approx(0.75)
    assert effect_kept(base, tuned, {"logits.0": torch.zeros(1, 3)}) is None


EQUAL = {
    "same_token_ids": True,
    "same_greedy_tokens": True,
    "max": 0.0,
    "largest": 20.0,
    "kl": 0.0,
    "top1": 1.0,
}


@pytest.mark.parametrize(
    ("limits", "figures", "says"),
    [
        (Tolerance(max=1e-5), {"max": 2.1e-4}, "logits that are up to 0.00021 off"),
        (Tolerance(max=1e-5), {"max": float("nan")}, "logits that are up to nan off"),
        (Tolerance(max=None, kl=1e-2), {"kl": 1.1e-2}, "probabilities that are 0.011 nats off"),
        (Tolerance(max=None, kl=1e-2), {"kl": float("nan")}, "probabilities that are nan nats off"),
        (
            Tolerance(max=None, top1=0.9),
            {"top1": 0.89},
            "the same most likely token at only 89.0% of positions",
        ),
        (Tolerance(max=None), {"same_greedy_tokens": False}, "a different answer"),
        (Tolerance(max=None, greedy=False), {"same_token_ids": False}, "different token ids"),
    ],
)
def test_each_figure_beyond_its_limit_is_named(
    limits: Tolerance, figures: dict[str, object], says: str
) -> None:
    assert says in str(limits.problem({**EQUAL, **figures}))


@pytest.mark.parametrize(
    ("limits", "figures"),
    [
        (Tolerance(max=1e-5), {"max": 1.9e-4}),
        (Tolerance(max=None, kl=1e-2), {"kl": 9e-3, "max": 5.0}),
        (Tolerance(max=None, top1=0.9), {"top1": 0.91, "kl": 9.0}),
        (Tolerance(max=None, greedy=False), {"same_greedy_tokens": False}),
    ],
)
def test_what_lies_within_its_limit_passes(limits: Tolerance, figures: dict[str, object]) -> None:
    assert limits.problem({**EQUAL, **figures}) is None
