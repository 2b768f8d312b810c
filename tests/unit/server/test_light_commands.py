"""Commands that look at a hub or steer it load neither torch nor transformers: nobody waits seconds for a table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

COMMANDS = """
status
rounds
privacy
rewards
accounts
invites create
invites list
pause
resume
recipe show
ledger show
ledger verify
variants list
certificate show
dashboard-keys list
"""
PROBE = """
import sys
import gym_fed.core.progress
gym_fed.core.progress.SILENT_SECONDS = 0.01
from gym_server.cli.main import app
app(["init", "--yes", "--dir", "hub"], standalone_mode=False)  # the first command describes the base, by its files
for line in sys.stdin.read().split("\\n"):
    if line:
        app([*line.split(), "--dir", "hub"], standalone_mode=False)
        found = {"torch", "transformers", "flwr", "datasets"} & set(sys.modules)
        assert not found, (line, found)
print("none of them")
"""


def test_commands_that_merge_and_train_nothing_load_no_torch(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        input=COMMANDS,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "none of them"
    assert "loading the hub's packages (" in done.stderr, "what takes longest is named while it goes on"


FACTS = """
import sys
from gym_fed.core.registries import AGGREGATORS, CONTRIBUTIONS, METHODS, PRE_AGGREGATORS, SERVER_OPTIMIZERS
for kind in (AGGREGATORS, CONTRIBUTIONS, METHODS, PRE_AGGREGATORS, SERVER_OPTIMIZERS):
    for name in kind.own():
        kind.type_of(name)
        assert "torch" not in sys.modules, (kind.kind, name)
print(AGGREGATORS.type_of("krum").minimum(2))
"""


def test_what_is_true_of_a_rule_is_read_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", FACTS], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr[-2000:]
