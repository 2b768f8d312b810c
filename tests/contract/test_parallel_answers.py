"""One task that its contributor answers several times at once."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from gym_server.store.tables import ledger, messages, updates
from sqlalchemy import func, select

from gym_fed.core.errors import ErrorCode, GymError
from tests.support.contributor import RawContributor
from tests.support.loopback_hub import LoopbackHub, some_delta, task_of_open_round, update_of
from tests.support.wait import SECONDS


@pytest.mark.parametrize("is_same", [False, True])
def test_two_answers_at_once_leave_one_update_and_the_first_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_same: bool
) -> None:
    hub = LoopbackHub(tmp_path / "hub")
    raw = RawContributor(hub.address).enrol()
    delta = some_delta(tmp_path, 1).read_bytes()
    task = task_of_open_round(hub, raw.session)
    raw.upload(delta)
    both, get = threading.Barrier(2), hub.fed.queue.get

    def get_at_once(message_id: str) -> Any:
        found = get(message_id)
        both.wait(SECONDS)
        return found

    monkeypatch.setattr(hub.fed.queue, "get", get_at_once)
    first = update_of(hub, raw.key.contributor, task, delta)
    second = first if is_same else update_of(hub, raw.key.contributor, task, delta)
    with hub.fed.database.reading() as tx:
        before = tx.scalar(select(func.count()).select_from(ledger))

    def submit(manifest: Any) -> Any:
        try:
            return raw.submit(task, manifest)
        except GymError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(submit, (first, second)))
    with hub.fed.database.reading() as tx:
        assert tx.scalar(select(func.count()).select_from(updates)) == 1
        assert tx.scalar(select(func.count()).select_from(ledger)) == before + 1
        row = tx.execute(select(messages.c.state, messages.c.receipt)).one()
    receipts = [answer for answer in answers if isinstance(answer, dict)]
    assert (row.state, json.loads(row.receipt)) == ("replied", receipts[0])
    if is_same:
        assert receipts[0] == receipts[1], "a call that was repeated before the first one returned"
    else:
        (error,) = (answer for answer in answers if isinstance(answer, GymError))
        assert error.code is ErrorCode.REPLAYED
    raw.close()
    hub.close()
