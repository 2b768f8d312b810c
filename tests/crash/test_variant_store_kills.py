"""A variant is the old one or the new one, whole, wherever a change is killed; the same command again completes it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from gym_fed.serving.store.store import VariantStore
from gym_fed.trust.identity.keys import SigningKey
from tests.support.small_variants import signed_small_delta

LINES = {
    "variant-staged": 1,
    "variant-renamed": 1,
    "variant-before-commit": 1,
    "variant-committed": 2,
    "variant-removed": None,
}
"""Where the process is killed, and the revision that is there afterwards."""

# One interpreter with everything imported; each addition is a process of its own, forked from it.
ADD = """
import os, signal, sys
from gym_fed.core import failpoints
import gym_fed.delta.file
from gym_fed.trust.identity.variant import SignedVariant
from gym_fed.serving.store.store import VariantStore
folder, delta, manifest, owner, *lines = sys.argv[1:]
for line in lines:
    child = os.fork()
    if not child:
        failpoints._armed[line] = (1, "")
        store = VariantStore.open(f"{folder}/{line}")
        if line == "variant-removed":
            store.remove("alice")
        store.add(delta, SignedVariant.parse(manifest), name="alice", owner=owner, replace=True)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL, line
"""


def test_a_change_killed_at_any_line_leaves_the_old_variant_or_the_new_one(tmp_path: Path) -> None:
    key = SigningKey.generate()
    old = signed_small_delta(tmp_path / "old.gymdelta", key, "alice")
    new = signed_small_delta(tmp_path / "new.gymdelta", key, "alice", revision=2, seed=1)
    for line in LINES:
        with VariantStore.open(tmp_path / line) as store:
            store.add(*old, name="alice", owner=key.contributor)
    words = [tmp_path, new[0], new[1].to_json(), key.contributor, *LINES]
    subprocess.run([sys.executable, "-c", ADD, *map(str, words)], check=True)
    for line, revision in LINES.items():
        with VariantStore.open(tmp_path / line) as store:
            found = [store.verify(record.name).revision for record in store.list()]
            assert found == ([] if revision is None else [revision]), line
            store.add(*new, name="alice", owner=key.contributor, replace=True)
            assert store.verify("alice").revision == 2
            store.history.keep(1)
            store.gc()
            objects = [path.stem for path in store.folder.glob("objects/*/*")]
            assert objects == [new[1].manifest.delta_sha256], line
