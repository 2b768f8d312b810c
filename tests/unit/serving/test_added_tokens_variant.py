"""Variants with added tokens are refused when they are added, by name."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from gym_fed.cli.main import app
from gym_fed.core.errors import ErrorCode, GymError
from tests.support.added_tokens import save_with_tokens


def test_a_delta_with_added_tokens_is_refused_by_variant_add_and_nothing_is_stored(
    tmp_path: Path, tiny_base: Path
) -> None:
    save_with_tokens(tiny_base, tmp_path / "tuned", ["<think>"])
    file, store = tmp_path / "d.gymdelta", tmp_path / "store"
    run = CliRunner().invoke
    assert (
        run(app, ["delta", "encode", str(tiny_base), str(tmp_path / "tuned"), "-o", str(file)]).exit_code == 0
    )
    words = ["variant", "add", str(file), "--name", "v", "--user", "u", "--unsigned", "--store", str(store)]
    done = run(app, words)
    assert isinstance(done.exception, GymError)
    assert done.exception.code is ErrorCode.BASE_MISMATCH
    assert "'<think>'" in done.exception.message
    assert "gym delta apply" in done.exception.hint
    listed = run(app, ["variant", "list", "--store", str(store), "--json"])
    assert '"v"' not in listed.output
