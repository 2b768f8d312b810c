"""docs/extending.md as its reader follows it: the package is installed from the page's blocks, its commands are run."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gym_quant import registry
from gym_quant.registry import get_codec
from typer.testing import CliRunner

from gym_fed.base.models import load_model
from gym_fed.cli.main import app
from gym_fed.core.registries import AGGREGATORS, ALGORITHMS, CODECS, GRADERS, TUNING
from gym_fed.delta.base import model_tensors
from gym_fed.delta.file import DeltaFile

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^<!-- file: (\S+) -->\n```\w+\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
COMMANDS = re.findall(r"^\$ gym (.+)$", PAGE, re.MULTILINE)
KINDS = (CODECS, AGGREGATORS, ALGORITHMS, GRADERS, TUNING)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty folder with the page's files; the package is on the path, with the facts that pip would write."""
    folder = tmp_path_factory.mktemp("extending")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    project = tomllib.loads(FILES["pyproject.toml"])["project"]
    facts = folder / f"my_gym-{project['version']}.dist-info"
    facts.mkdir()
    header = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (facts / "METADATA").write_text(header)
    groups = project["entry-points"].items()
    points = (
        f"[{group}]\n" + "".join(f"{n} = {v}\n" for n, v in members.items()) for group, members in groups
    )
    (facts / "entry_points.txt").write_text("\n".join(points))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.chdir(folder)
        for kind in KINDS:
            patch.setattr(kind, "_types", dict(kind._types))
        forget()
        yield folder
    forget()


def forget() -> None:
    registry._all_installed.cache_clear()
    get_codec.cache_clear()


@pytest.fixture(scope="module")
def shown(page: Path) -> dict[str, str]:
    """What each command of the page printed, after all of them succeeded in their order."""
    found = {}
    for command in COMMANDS:
        done = CliRunner().invoke(app, shlex.split(command))
        assert done.exit_code == 0, f"$ gym {command}\n{done.output}\n{done.exception!r}"
        found[command] = done.output
    return found


def test_the_page_has_five_members_and_uses_each_of_them(page: Path) -> None:
    names = {name for kind in KINDS for name in set(kind.names()) - set(kind.own())}
    assert names == {"nf4", "interquartile_mean", "focal_sft", "similar_text", "layer_norm"}
    for kind in KINDS:
        for name in names & set(kind.names()):
            assert kind.type_of(name).__module__ == f"my_gym.{name}"
    used = " ".join([*COMMANDS, FILES["train.yaml"], FILES["graders.yaml"]])
    assert all(name in used for name in names)


@pytest.mark.parametrize("shape", [(6, 8), (5, 7), (3,)], ids=str)
def test_the_codec_is_within_half_a_step_and_half_a_byte_a_weight(page: Path, shape: tuple[int, ...]) -> None:
    codec, delta = get_codec("nf4"), torch.randn(shape, generator=torch.Generator().manual_seed(0))
    made = codec.encode(delta)
    decoded = codec.decode(made.payload, shape, made.params)
    largest = delta.abs().amax(dim=-1, keepdim=True)
    assert bool(
        ((decoded - delta).abs() <= 0.16 * largest).all()
    )  # the widest step is 0.3038, from -1 to -0.6962
    assert made.payload["codes"].shape[1] == (shape[-1] + 1) // 2
    kept = codec.resident(made.payload, shape, made.params, torch.device("cpu"))
    assert kept is not None
    assert torch.equal(kept.decode_block(0, decoded.reshape(-1, shape[-1]).shape[0]).reshape(shape), decoded)
    twice = codec.scaled(made.payload, shape, made.params, 2.0)
    assert torch.equal(codec.decode(twice, shape, made.params), 2 * decoded)


def test_the_aggregator_is_the_mean_of_the_middle_half_and_withstands_a_quarter(page: Path) -> None:
    rule_type = AGGREGATORS.type_of("interquartile_mean")
    rule = rule_type(rule_type.Config(num_malicious_nodes=1))
    updates = torch.tensor([[1.0], [2.0], [4.0], [1e6]])
    assert rule.aggregate(updates, torch.ones(4)).tolist() == [3.0]
    with pytest.raises(Exception, match="too few"):
        rule.aggregate(updates[:3], torch.ones(3))


def test_the_algorithms_loss_is_the_papers_formula_and_plain_cross_entropy_at_gamma_0(page: Path) -> None:
    ALGORITHMS.type_of("focal_sft")
    from my_gym.focal_sft import focal

    logits, labels = torch.randn(9, 5, generator=torch.Generator().manual_seed(0)), torch.arange(9) % 5
    plain = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    assert torch.allclose(focal(logits, labels, 0.0), plain, atol=1e-6)
    assert torch.allclose(focal(logits, labels, 2.0), (1 - torch.exp(-plain)) ** 2 * plain, atol=1e-6)


@pytest.mark.slow
def test_the_pages_commands_train_encode_merge_and_grade_with_all_five(
    page: Path, shown: dict[str, str]
) -> None:
    assert len(shown) == len(COMMANDS) == 6
    recorded: dict[str, Any] = json.loads((page / "runs/ada/run.json").read_text())
    assert {(r["kind"], r["name"], r["distribution"]) for r in recorded["plugins"]} == {
        ("algorithm", "focal_sft", "my-gym"),
        ("tuning method", "layer_norm", "my-gym"),
    }
    base, tuned = (model_tensors(load_model(name).model) for name in ("gym-nano", str(page / "runs/ada")))
    changed = {name for name in base if not torch.equal(base[name].float(), tuned[name].float())}
    assert changed
    assert changed == {name for name in base if "norm" in name or "o_proj" in name}
    with (
        DeltaFile.open(page / "ada.gymdelta") as ada,
        DeltaFile.open(page / "ben.gymdelta") as ben,
        DeltaFile.open(page / "soup.gymdelta") as soup,
    ):
        name = next(n for n in ada.names if n.endswith("o_proj.weight"))
        assert ada.record(name).codec == "nf4"
        mean = (ada.decode(name) + ben.decode(name)) / 2
        assert torch.allclose(soup.decode(name), mean, atol=1e-7)
    graded = next(text for command, text in shown.items() if command.startswith("grade"))
    assert re.search(r"similar_text +0\.8333", graded)  # 1, and 2 * 2 / 6
