"""The table of docs/fuzzing.md counts what the fuzzer's logs say, also of runs that a finding or a kill ended."""

from __future__ import annotations

from tests.fuzz.report import Run, read

DONE = """INFO: Using built-in libfuzzer
#3	INITED cov: 100 ft: 100 corp: 2/10b exec/s: 0 rss: 90Mb
#64	NEW    cov: 120 ft: 130 corp: 3/20b lim: 20 exec/s: 9 rss: 90Mb
#200	DONE   cov: 125 ft: 140 corp: 4/30b lim: 20 exec/s: 9 rss: 90Mb
Done 200 runs in 61 second(s)
"""
FOUND = """INFO: Using built-in libfuzzer
#7	INITED cov: 124 ft: 140 corp: 4/30b exec/s: 0 rss: 90Mb
#50	REDUCE cov: 130 ft: 150 corp: 5/30b lim: 20 exec/s: 9 rss: 90Mb
 === Uncaught Python exception: ===
"""


def test_runs_of_a_log_are_added_up() -> None:
    assert read("INFO: Instrumenting a\n" + DONE + "exit 0\n" + FOUND + "exit 77\n") == Run(
        executions=250, seconds=61, first=100, reached=130, findings=1
    )


def test_a_log_in_which_no_run_began_has_nothing() -> None:
    assert read("INFO: Instrumenting a\nTraceback\n") == Run(0, 0, 0, 0, 0)
