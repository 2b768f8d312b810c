"""The process of a screen's views: requests on standard input, answers on standard output, each a line of JSON.

It ends with its standard input, so that a killed workbench leaves none behind.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError


def main() -> None:
    """Answer until the input ends."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # what a library prints is no answer
    module, _, name = sys.argv[1].partition(":")
    views = getattr(import_module(module), name)(Path.cwd())
    for line in sys.stdin:
        answers.write(json.dumps(_answer(views, json.loads(line))) + "\n")
        answers.flush()


def _answer(views: Any, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"answer": views.answer(request)}
    except GymError as error:
        return {"error": error.to_dict()}
    except Exception as error:  # noqa: BLE001  # of a template or a library: the next request is another
        problem = f"{type(error).__name__}: {error}"[:500]
        return {"error": GymError(ErrorCode.INTERNAL, f"this could not be read: {problem}").to_dict()}


if __name__ == "__main__":
    main()
