"""The process that reads and tokenises rows: requests on standard input, answers on standard output, each a line.

It ends with its standard input, so that a killed workbench leaves none behind.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from gym_fed.errors import ErrorCode, GymError
from gym_fed.webui.rows.views import RowViews


def main() -> None:
    """Answer until the input ends."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # what a library prints is no answer
    views = RowViews(Path.cwd())
    for line in sys.stdin:
        answers.write(json.dumps(_answer(views, json.loads(line))) + "\n")
        answers.flush()


def _answer(views: RowViews, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"answer": views.answer(request)}
    except GymError as error:
        return {"error": error.to_dict()}
    except Exception as error:  # noqa: BLE001  # of a template or a library: the next request is another
        problem = f"{type(error).__name__}: {error}"[:500]
        return {"error": GymError(ErrorCode.INTERNAL, f"the rows could not be shown: {problem}").to_dict()}


if __name__ == "__main__":
    main()
