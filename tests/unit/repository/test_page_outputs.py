"""``tools.outputs``: what commands printed, written below them into a page."""

from __future__ import annotations

from tools.outputs import MARK, MAX_CHARS, MAX_LINES, shortened, written

PAGE = f"""# A page

{MARK}
```console
$ first \\
    --more
old output
$ second &
$ third
```

```console
$ server
its output
```
"""


def test_outputs_replace_those_of_before_and_other_blocks_stay() -> None:
    printed = iter([("first      --more", "new output\n"), ("third", "3\n")])
    text = written(PAGE, printed)
    assert "$ first \\\n    --more\nnew output\n$ second &\n$ third\n3\n```" in text
    assert text.endswith("$ server\nits output\n```\n")


def test_long_outputs_are_cut_and_say_so() -> None:
    assert shortened("\n".join(map(str, range(MAX_LINES)))) == [*map(str, range(MAX_LINES))]
    assert shortened("\n".join(map(str, range(99))))[-2:] == [str(MAX_LINES - 2), "..."]
    assert shortened("x" * 999) == ["x" * (MAX_CHARS - 3) + "..."]
