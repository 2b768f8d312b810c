"""What a command refuses: with ``--json`` one line of JSON on standard error, and nothing on standard output."""

from __future__ import annotations

import gc
import json
import sys
import warnings
from collections.abc import Iterator

import pytest
import typer
from gym_client.cli.main import app as client
from gym_server.cli.main import app as server

from gym_fed.cli.main import app as gym
from gym_fed.core.console import run_app
from gym_fed.core.errors import ErrorCode, GymError

COMMANDS: dict[str, typer.Typer] = {"gym": gym, "gym-server": server, "gym-client": client}
REFUSED = {
    "gym nosuch": ErrorCode.USAGE,
    "gym eval --nosuch x": ErrorCode.USAGE,
    "gym eval show nope": ErrorCode.FILE_NOT_FOUND,
    "gym export": ErrorCode.USAGE,
    "gym train nope.yaml": ErrorCode.FILE_NOT_FOUND,
    "gym runs show nope": ErrorCode.FILE_NOT_FOUND,
    "gym data show nope.jsonl": ErrorCode.FILE_NOT_FOUND,
    "gym variant show x --store none": ErrorCode.FILE_NOT_FOUND,
    "gym soup merge a b --rule nosuch": ErrorCode.CONFIG_INVALID,
    "gym-server status --dir none": ErrorCode.FILE_NOT_FOUND,
    "gym-server rollback x --dir none": ErrorCode.USAGE,
    "gym-server run --dir none": ErrorCode.FILE_NOT_FOUND,
    "gym-server dashboard-keys add otto --role root --dir none": ErrorCode.USAGE,
    "gym-client status --home home": ErrorCode.USAGE,
    "gym-client join --home home": ErrorCode.USAGE,
    "gym-client transfer": ErrorCode.USAGE,
}


@pytest.fixture(autouse=True)
def _as_before(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(str(tmp_path))
    monkeypatch.setenv("GYM_HOME", str(tmp_path))
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    threshold = gc.get_threshold()
    yield
    gc.set_threshold(*threshold)


@pytest.mark.parametrize("line", REFUSED)
def test_a_refusal_has_one_form(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = line.split()
    monkeypatch.setattr(sys, "argv", [*words, "--json"])
    with pytest.raises(SystemExit) as ended:
        run_app(COMMANDS[words[0]])
    said = capsys.readouterr()
    assert said.out == ""
    (line_of_error,) = said.err.splitlines()
    error = json.loads(line_of_error)["error"]
    assert set(error) == {"code", "message", "hint"}
    assert error["code"] == REFUSED[line].value
    assert ended.value.code == REFUSED[line].exit_code
    found = GymError.last_in(said.err)
    assert found is not None
    assert found.to_dict() == error


def test_the_error_is_found_behind_warnings_and_before_noise() -> None:
    error = GymError(ErrorCode.STALE, "round\n3 is past", "join again")
    found = GymError.last_in(f'{{"error": 3}}\na warning\n{error.to_json_line()}\n[1]\nnull\n')
    assert found is not None
    assert found.to_dict() == error.to_dict()
    assert GymError.last_in("Traceback\n7\n") is None
