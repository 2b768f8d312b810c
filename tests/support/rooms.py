"""How long the tests of each folder took, for the last lines of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pytest


def seconds_by_room(reports: Iterable[object]) -> dict[str, float]:
    """Seconds of setup, call and teardown by folder of tests, the longest first; a room is a folder of tests/unit."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for report in reports:
        if isinstance(report, pytest.TestReport):
            folders = report.nodeid.partition("::")[0].split("/")[:-1]
            seconds["/".join(folders[: 3 if folders[1:2] == ["unit"] else 2])] += report.duration
    return dict(sorted(seconds.items(), key=lambda room: -room[1]))
