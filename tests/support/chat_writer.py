"""A writer without a model: answers from a rule, a character at a time, within a context of so many characters."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError


class RuleWriter:
    """Notes every body that it is asked with in ``asked``, and in ``closed`` how many answers were ended early."""

    base = "rule"

    def __init__(
        self,
        rule: Callable[[str], str] = str.upper,
        *,
        context: int = 1000,
        names: tuple[str, ...] = ("ada", "ben"),
        remembers: bool = True,
        pause_seconds: float = 0.0,
    ) -> None:
        self.rule, self.context, self.names, self.remembers = rule, context, names, remembers
        self.pause_seconds = pause_seconds
        self.sampling_defaults: dict[str, Any] = {}
        self.asked: list[dict[str, Any]] = []
        self.closed = 0

    def variants(self) -> list[str]:
        return list(self.names)

    def write(self, url: str, body: dict[str, Any]) -> Generator[dict[str, Any]]:
        contents = [m["content"] for m in body["messages"]] if self.remembers else [body["prompt"]]
        texts = [each if isinstance(each, str) else each[-1]["text"] for each in contents]
        if sum(map(len, texts)) > self.context:
            raise GymError(ErrorCode.TOO_LARGE, f"more than {self.context} characters")
        self.asked.append({"url": url, **body})
        answer = self.rule(texts[-1])
        most = body.get("max_tokens", len(answer))
        whole = False
        try:
            for letter in answer[:most]:
                time.sleep(self.pause_seconds)
                piece = {"delta": {"content": letter}} if self.remembers else {"text": letter}
                yield {"choices": [{"index": 0, "finish_reason": None, **piece}]}
            whole = True
        finally:
            self.closed += not whole
        reason = "length" if len(answer) > most else "stop"
        yield {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}

    def close(self) -> None:
        """Nothing is held."""


def main() -> None:
    """`gym chat` with this writer, for a test with a terminal of its own: no model has to be loaded."""
    from gym_fed.cli.chat import command as chat
    from gym_fed.cli.main import main as gym

    def local(model: str, *rest: object) -> RuleWriter:
        return RuleWriter(answer, pause_seconds=0.01)

    def answer(text: str) -> str:
        if text == "slow":
            sys.stderr.write("reading the prompt\n")
            time.sleep(60)  # Ctrl-C comes before the first letter
        return "." * 400 if text == "long" else text.upper()

    chat._local = local
    sys.argv = ["gym", "chat", *sys.argv[1:]]
    gym()


if __name__ == "__main__":
    main()
