"""The commands of `gym models` on a registry: output, and errors for wrong input."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gym_fed.base.models import load_model
from gym_fed.cli.main import main
from gym_fed.core.errors import ErrorCode
from gym_fed.delta.base import model_tensors
from gym_fed.delta.file import DeltaFile
from gym_fed.registry import DataUsed, ModelRegistry


@pytest.fixture
def gym(store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs ``gym models`` on the store: status, standard output, standard error."""

    def run(*words: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["gym", "models", *map(str, words), "--registry", str(store)])
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        return int(ended.value.code or 0), shown.out, shown.err

    return run


def test_a_model_goes_through_all_verbs(gym: Any, model: Path, tmp_path: Path) -> None:
    (model / "notes.log").write_text("mine")
    status, out, err = gym("push", "me/tiny", model, "--licence", "mit", "--tag", "stable")
    assert (status, "me/tiny@1 is in" in out) == (0, True), err
    assert "not pushed: notes.log" in err
    assert gym("list", "--json")[0] == 0
    shown = json.loads(gym("show", "me/tiny:stable", "--json")[1])
    assert (shown["version"], shown["licence"], shown["signer_is_trusted"]) == (1, "MIT", True)
    assert "as signed by sha256:" in gym("verify", "me/tiny")[1]
    pulled = json.loads(gym("pull", "me/tiny", "-o", tmp_path / "out", "--json")[1])
    assert (tmp_path / "out/model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert pulled["fetched"] is True
    assert gym("tag", "me/tiny", "stable", "--remove")[0] == 0
    assert json.loads(gym("tag", "me/tiny", "--json")[1])["tags"] == {"latest": 1}
    status, out, _ = gym("push", "me/tiny", "--to", "hf", "-o", tmp_path / "hf", "--json")
    assert (status, json.loads(out)["kind"]) == (0, "weights")


def test_every_verb_that_writes_a_delta_prints_the_share_that_it_keeps(
    gym: Any, model: Path, delta: Path, tmp_path: Path
) -> None:
    of_hub = ("push", "me/tuned@1", "--to", "hf")
    for words, merges in (
        (("push", "me/tuned", delta), False),
        (("pull", "me/tuned", "-o", tmp_path / "pulled"), True),
        (("pull", "me/tuned", "-o", tmp_path / "as-is", "--as-is"), False),
        ((*of_hub, "-o", tmp_path / "hub"), True),
        ((*of_hub, "-o", tmp_path / "hub-as-is", "--as-is"), False),
    ):
        status, out, err = gym(*words, *(() if "--as-is" in words else ("--base", model)))
        assert status == 0, err
        assert "; keeps 100.0% of the delta" in " ".join(out.split()), words
        folder = Path(words[-1])
        if merges:
            assert share_in(folder, model, delta) > 0.9999
        elif folder.is_dir():
            assert (folder / "delta.gymdelta").read_bytes() == delta.read_bytes()
    words = ("-o", tmp_path / "pulled", "--base", model, "--json")
    again = json.loads(gym("pull", "me/tuned", *words)[1])
    assert (again["fetched"], again["kept"]) == (False, None), "it was measured when the model was rebuilt"
    gym("push", "me/base", model)
    assert json.loads(gym("pull", "me/base", "-o", tmp_path / "base", "--json")[1])["kept"] is None


def share_in(written: Path, base: Path, delta: Path) -> float:
    """The share of a delta that is in the weights of a folder, from its files alone."""
    old, new = (model_tensors(load_model(str(folder)).model) for folder in (base, written))
    lost = whole = 0.0
    with DeltaFile.open(delta) as opened:
        for name in opened.names:
            change = opened.decode(name).double()
            whole += float(change.square().sum())
            lost += float((new[name].double() - old[name].double() - change).square().sum())
    return 1 - (lost / whole) ** 0.5


def test_yes_at_a_pull_says_whose_key_it_accepts_and_that_it_is_pinned(
    gym: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signer = json.loads(gym("push", "me/tiny", model, "--json")[1])["signer"]
    monkeypatch.setenv("GYM_HOME", str(tmp_path / "new"))
    assert gym("pull", "me/tiny", "-o", tmp_path / "none")[0] != 0
    status, _, err = gym("pull", "me/tiny", "-o", tmp_path / "out", "--yes")
    assert status == 0
    said = " ".join(err.split())
    assert signer in said
    assert "--yes accepts it: it is pinned, and only this key is accepted from then on" in said
    assert "pinned" not in gym("pull", "me/tiny", "-o", tmp_path / "again")[2], "it is asked once"
    for verb in ("pull", "verify", "push"):
        assert "Accept an unknown signer the first time" in " ".join(
            re.sub(r"[^ -~]", " ", gym(verb, "--help")[1]).split()
        )


def test_a_place_without_a_registry_is_refused_and_an_empty_one_said(gym: Any, store: Path) -> None:
    status, out, err = gym("list")
    assert (status, out) == (ErrorCode.NOT_FOUND.exit_code, "")
    assert f"there is no registry at {store}" in " ".join(err.split())
    store.mkdir()
    status, _, err = gym("list")
    assert status == 0
    assert "has no models yet" in err


def test_what_a_push_says_to_fetch_it_with_names_the_registry(gym: Any, store: Path, model: Path) -> None:
    said = " ".join(gym("push", "me/tiny", model)[2].split())
    assert f"gym models pull me/tiny@1 --registry {store}" in said


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("push", "me/tiny"), "no MODEL is given"),
        (("push", "me/tiny", "nowhere"), "nowhere: no such file or folder"),
        (("push", "Me/Tiny", "MODEL"), "is not a valid model name"),
        (("push", "me/tiny", "MODEL", "--licence", "Free"), "Free"),
        (("push", "me/tiny", "MODEL", "--tag", "latest"), "always refers to the newest"),
        (("push", "me/tiny", "MODEL", "--tag", "3"), "is not a valid tag"),
        (("push", "me/tiny", "MODEL", "--parent", "me/none@1"), "no model me/none"),
        (("push", "me/tiny", "MODEL", "--evals", "nowhere"), "no evaluation record at nowhere"),
        (("push", "me/tiny", "MODEL", "--description", "x" * 2001), "description"),
        (("push", "me/tiny", "MODEL", "--repo", "me/tiny"), "--repo needs --to hf"),
        (("push", "me/tiny", "MODEL", "--to", "hf"), "--registry applies only to a registry"),
        (("push", "me/tiny", "--to", "hf"), "--to hf needs a folder"),
        (("push", "me/none", "--to", "hf", "-o", "hf"), "no model me/none"),
        (("push", "me/none", "--to", "hf", "-o", "hf", "--tag", "x"), "--tag needs MODEL"),
        (("push", "me/none", "--to", "hf", "-o", "hf", "--public"), "--public needs --repo"),
        (("push", "me/none", "--to", "hf", "-o", "hf", "--repo", "none"), "is not a valid repository name"),
        (("pull", "me/none"), "no model me/none"),
        (("show", "me/none@0"), "'0' is not a version"),
        (("verify", "me/none"), "no model me/none"),
        (("tag", "me/none"), "no model me/none"),
        (("tag", "me/none", "--remove"), "--remove needs a tag"),
    ],
)
def test_wrong_input_is_refused_by_name_and_nothing_is_written(
    gym: Any, store: Path, model: Path, tmp_path: Path, words: tuple[str, ...], named: str, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = gym(*(str(model) if word == "MODEL" else word for word in words))
    assert status not in (0, 1), err
    assert named in " ".join(err.split())
    assert "Traceback" not in err
    assert out == ""
    assert not (store / "models").exists()
    assert not (tmp_path / "hf").exists()


def test_a_conflict_of_licences_is_said_at_the_push_in_show_and_in_the_card(
    gym: Any, store: Path, model: Path, tmp_path: Path
) -> None:
    data = [DataUsed(name="facebook/xnli", licence="CC-BY-NC-4.0")]
    ModelRegistry(store).push("me/tiny", model, licence="mit", data=data)
    sentence = "data facebook/xnli: CC-BY-NC-4.0 forbids commercial use"
    assert sentence in json.loads(gym("show", "me/tiny", "--json")[1])["conflicts"][0]
    assert sentence in " ".join(gym("show", "me/tiny")[2].split())
    folder = ModelRegistry(store).pull("me/tiny", tmp_path / "out")
    assert "forbids commercial use" in (folder / "README.md").read_text()
    status, _, err = gym("push", "me/free", model)
    assert status == 0
    assert "the model's own licence is not stated" in " ".join(err.split())


def test_what_others_wrote_drives_no_terminal_and_is_no_markup_in_a_card(
    gym: Any, store: Path, model: Path, tmp_path: Path
) -> None:
    evil = "\x1b]0;owned\x07 [bold]x[/] <script>y</script> [z](http://a.b)\n# head\r\u202e"
    data = [DataUsed(name=f"rows{evil}", licence=f"MIT{evil}")]
    ModelRegistry(store).push("me/tiny", model, licence="mit", description=evil, data=data)
    _, out, err = gym("show", "me/tiny")
    assert not {"\x1b", "\x07", "\r", "\u202e"} & set(out + err)
    assert "[bold]x[/]" in out
    card = (ModelRegistry(store).pull("me/tiny", tmp_path / "out") / "README.md").read_text()
    assert not {"\x1b", "\x07", "\r", "\u202e"} & set(card)
    assert "<script>" not in card.replace("\\<script\\>", "")
    assert "[z](http" not in card
    assert "\n# head" not in card
