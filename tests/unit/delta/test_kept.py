"""A written model keeps at least 99% of its delta by default, and every writer says how much it keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gym_server.cli.setup import HubChoices, init_hub
from gym_server.federation import Federation
from gym_server.rounds.hub_model import HubModel
from safetensors.torch import load_file
from typer.testing import CliRunner

from gym_fed.base.models import load_model
from gym_fed.cli.main import app
from gym_fed.delta.base import model_tensors
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.kept import KeptDelta, precise_dtype, share_applied, share_kept
from gym_fed.serving.base import load_base
from tests.support.adapters import sibling
from tests.support.peft_adapters import made

pytestmark = pytest.mark.usefixtures("warm_children")

SMALL = 1e-4
"""Of a change: a bfloat16 weight of 0.02 has steps of 1.2e-4."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose folder is in bfloat16."""
    folder = tmp_path_factory.mktemp("kept") / "base"
    loaded = load_model(str(sibling("Llama", folder.with_name("exact"))))
    loaded.model.to(torch.bfloat16).save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(base: Path) -> Path:
    """A LoRA whose change is small next to the weights."""
    made(base, base.with_name("adapter"), lora_alpha=0.001)
    return base.with_name("adapter")


def change(model: Path, base: Path) -> dict[str, torch.Tensor]:
    """What the folder's files hold beyond the base, by tensor."""
    old = model_tensors(load_model(str(base)).model)
    return {name: found - old[name] for name, found in model_tensors(load_model(str(model)).model).items()}


def share(written: Path, adapter: Path, base: Path) -> float:
    """The share of the adapter's change that is in a written folder, computed from its files alone."""
    from gym_fed.base.modeling.adapters import merged

    exact = model_tensors(merged(load_model(str(adapter)).model))
    old = model_tensors(load_model(str(base)).model)
    found = change(written, base)
    wanted = {name: exact[name] - old[name] for name in exact}
    lost = sum(float((found[name] - wanted[name]).square().sum()) for name in wanted)
    return 1 - (lost / sum(float(value.square().sum()) for value in wanted.values())) ** 0.5


def run(*words: object) -> dict[str, object]:
    result = CliRunner().invoke(app, [*map(str, words), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found: dict[str, object] = json.loads(result.stdout)
    return found


def test_the_share_is_measured_against_the_delta_and_not_against_the_weights() -> None:
    base = {"w": torch.full((1000,), 0.02).bfloat16().float()}
    tuned = {"w": base["w"] + torch.linspace(-SMALL, SMALL, 1000)}
    lost = share_kept(base, tuned, "bfloat16")
    assert lost is not None
    assert lost < 0.6
    assert share_kept(base, tuned, "float32") == 1.0
    assert share_kept(base, base, "bfloat16") is None
    assert precise_dtype("bfloat16", base, tuned) == "float32"
    assert precise_dtype("bfloat16", base, {"w": base["w"] + 100.0}) == "bfloat16"


def test_a_model_without_the_delta_keeps_nothing_and_one_that_is_worse_keeps_nothing_either() -> None:
    base, tuned = torch.zeros(9), torch.ones(9)
    for written in (base, -5 * tuned):
        kept = KeptDelta()
        kept.add(base, tuned, written)
        assert kept.share == 0.0


def test_an_export_of_an_adapter_keeps_its_change_unless_a_coarser_dtype_is_named(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    found = run("export", adapter, "-o", tmp_path / "whole", "--skip-check")
    assert found["kept"] == {"share": 1.0, "of": "delta", "stored_as": "float32"}
    assert {value.dtype for value in load_file(tmp_path / "whole/model.safetensors").values()} == {
        torch.float32
    }
    assert share(tmp_path / "whole", adapter, base) > 0.999
    coarse = run("export", adapter, "-o", tmp_path / "coarse", "--skip-check", "--dtype", "bfloat16")
    kept = coarse["kept"]
    assert isinstance(kept, dict)
    assert kept["share"] < 0.9
    assert kept["share"] == pytest.approx(share(tmp_path / "coarse", adapter, base), abs=1e-3)
    assert "--dtype float32 keeps more" in str(coarse["notes"])


def test_an_export_in_few_bits_without_its_check_says_that_the_share_was_not_measured(
    adapter: Path, tmp_path: Path
) -> None:
    command = ["export", str(adapter), "-o", str(tmp_path / "few.gguf"), "--quantization", "q8_0"]
    result = CliRunner().invoke(app, [*command, "--skip-check"])
    assert result.exit_code == 0, result.output
    assert "share of the delta that q8_0 keeps was not measured" in " ".join(result.output.split())
    plain = [
        "export",
        "gym-nano",
        "-o",
        str(tmp_path / "plain.gguf"),
        "--quantization",
        "q8_0",
        "--skip-check",
    ]
    assert "share of the delta" not in CliRunner().invoke(app, plain, catch_exceptions=False).output


@pytest.mark.parametrize("kind", ["LoRA", "DoRA"])
def test_an_export_as_a_delta_keeps_the_change(base: Path, adapter: Path, tmp_path: Path, kind: str) -> None:
    source = adapter
    if kind == "DoRA":  # its change has no factors
        source = tmp_path / "dora"
        made(base, source, use_dora=True)
    found = run("export", source, "-o", tmp_path / "it.gymdelta", "--skip-check")
    kept = found["kept"]
    assert isinstance(kept, dict)
    assert (kept["of"], kept["stored_as"]) == ("delta", ".gymdelta")
    assert 0.99 <= kept["share"] <= 1.0
    run("delta", "apply", base, tmp_path / "it.gymdelta", "-o", tmp_path / "applied")
    wanted, written = (
        change(folder, base) for folder in (exact_folder(source, tmp_path), tmp_path / "applied")
    )
    lost = sum(float((written[name] - value).square().sum()) for name, value in wanted.items())
    whole = sum(float(value.square().sum()) for value in wanted.values())
    assert 1 - (lost / whole) ** 0.5 == pytest.approx(kept["share"], abs=2e-3)


def exact_folder(source: Path, tmp_path: Path) -> Path:
    """The whole fine-tune in float32, written by transformers."""
    from gym_fed.base.modeling.adapters import merged

    merged(load_model(str(source)).model).save_pretrained(tmp_path / "exact")
    load_model(str(source)).tokenizer.save_pretrained(tmp_path / "exact")
    return tmp_path / "exact"


def test_a_gguf_file_of_an_adapter_is_in_float32_where_the_stored_type_would_lose_its_change(
    adapter: Path, tmp_path: Path
) -> None:
    found = run("export", adapter, "-o", tmp_path / "it.gguf", "--skip-check")
    assert found["quantization"] == "f32"
    assert found["kept"] == {"share": 1.0, "of": "delta", "stored_as": "float32"}


def test_a_base_alone_is_exported_in_the_type_of_its_files(base: Path, tmp_path: Path) -> None:
    found = run("export", base, "-o", tmp_path / "whole", "--skip-check")
    assert "kept" not in found
    assert {value.dtype for value in load_file(tmp_path / "whole/model.safetensors").values()} == {
        torch.bfloat16
    }


def test_delta_apply_and_a_variant_keep_the_whole_change(base: Path, adapter: Path, tmp_path: Path) -> None:
    file = tmp_path / "v.gymdelta"
    encoded = run("delta", "encode", base, adapter, "-o", file, "--codec", "lora", "--set", "factors=float32")
    assert encoded["kept"] == pytest.approx(1.0, abs=1e-4)
    applied = run("delta", "apply", base, file, "-o", tmp_path / "applied")
    assert applied["dtype"] == "float32"
    assert applied["kept"] == pytest.approx(1.0, abs=1e-4)
    coarse = {name: t.bfloat16() for name, t in model_tensors(load_model(str(base)).model).items()}
    with DeltaFile.open(file) as delta:
        survived = share_applied(coarse, delta)
        tuned = {name: coarse[name].float() + delta.decode(name) for name in delta.names}
    assert survived is not None
    assert survived < 0.9
    assert survived == pytest.approx(share_kept(coarse, tuned, "bfloat16"), abs=1e-4)
    assert share(tmp_path / "applied", adapter, base) > 0.99
    store = tmp_path / "variants"
    run("variant", "add", file, "--unsigned", "--user", "ana", "--variants", store)
    found = run(
        "export", base, "--variant", "v", "--variants", store, "-o", tmp_path / "whole", "--skip-check"
    )
    assert found["kept"] == {"share": 1.0, "of": "delta", "stored_as": "float32"}
    assert share(tmp_path / "whole", adapter, base) > 0.99


def test_a_soup_says_how_much_of_the_merged_delta_its_encoding_keeps(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    words = ["soup", "merge", adapter, "--rule", "mean", "--base", base, "-o", tmp_path / "soup.gymdelta"]
    found = run(*words)
    kept = found["kept"]
    assert isinstance(kept, float)
    assert kept >= 0.99
    run("delta", "apply", base, tmp_path / "soup.gymdelta", "-o", tmp_path / "applied")
    assert share(tmp_path / "applied", adapter, base) == pytest.approx(kept, abs=5e-3)
    printed = CliRunner().invoke(app, [*map(str, words), "--overwrite"], catch_exceptions=False).output
    assert f"keeps {kept:.2%} of the merged delta" in " ".join(printed.split())


@pytest.mark.parametrize(("size", "dtype"), [(SMALL, "float32"), (100.0, "bfloat16")])
def test_a_hubs_version_is_written_in_a_type_that_keeps_what_the_rounds_changed(
    base: Path, tmp_path: Path, size: float, dtype: str
) -> None:
    init_hub(tmp_path / "hub", HubChoices(str(base), "h", "open"))
    with Federation.open(tmp_path / "hub") as fed:
        for asked, name in ((None, "default"), ("bfloat16", "coarse")):
            hub = HubModel(fed.base, fed.config.base_model, fed.store, fed.config.gate, fed.folder)
            torch.manual_seed(0)
            with torch.no_grad():
                for tensor in model_tensors(hub.model).values():
                    tensor.add_(size * torch.randn_like(tensor))
            written, kept = hub.save(tmp_path / name, asked)
            assert kept is not None
            assert written == (asked or dtype)
            assert (kept >= 0.99) is (written == dtype)
            stored = load_file(tmp_path / name / "model.safetensors")
            assert {str(value.dtype) for value in stored.values()} == {f"torch.{written}"}


def test_serving_an_adapter_in_a_type_that_rounds_it_away_logs_the_share(
    base: Path, adapter: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_base(str(base), [str(adapter)], "float32")
    assert "of the delta" not in caplog.text
    load_base(str(base), [str(adapter)], "bfloat16")
    assert "of the delta in bfloat16: rounding loses the rest" in caplog.text


def test_a_quantised_export_says_how_much_of_the_deltas_effect_on_the_logits_is_left(
    shared_folder: Path, tmp_path: Path
) -> None:
    shares = []
    for number, alpha in enumerate((1e-4, 1.0)):
        made(shared_folder / "models/stories260K", tmp_path / f"{number}", lora_alpha=alpha)
        found = run(
            *("export", tmp_path / f"{number}", "-o", tmp_path / f"{number}.gguf", "--quantization", "q8_0")
        )
        kept = found["kept"]
        assert isinstance(kept, dict)
        assert (kept["of"], kept["stored_as"]) == ("delta's effect on the logits", "q8_0")
        shares.append(kept["share"])
        assert ("a finer --quantization" in str(found.get("notes"))) is (kept["share"] < 0.99)
    assert shares[0] < 0.5
    assert shares[1] > 0.9
