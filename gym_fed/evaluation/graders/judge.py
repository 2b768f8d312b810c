"""Scores from a judge model (LLM as a judge, Zheng et al. 2023) behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import regex  # type: ignore[import-untyped]
from pydantic import Field, model_validator

from gym_fed.config.train.graders import GraderConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.requirements import require_package
from gym_fed.core.text import counted
from gym_fed.evaluation.graders.base import Grader, Sample, from_environment

_SEARCH_SECONDS = 1.0
_JUDGE_PROMPT = """You judge answers. Below are a question, a reference answer (which may be empty) and an answer.
Say in one sentence what is right and wrong about the answer, then end with a line of the form "Score: N", \
where N is a number from 0 (useless) to 10 (perfect).

Question:
{prompt}

Reference answer:
{answer}

Answer:
{completion}
"""


class JudgeConfig(GraderConfig):
    """The score of another model for the answer, through any OpenAI-compatible endpoint."""

    model: str
    base_url: str = Field(pattern=r"^https?://")
    """URL of the endpoint, such as ``http://localhost:8000/v1``."""

    api_key_env: str | None = None
    """The environment variable with the API key; the key itself is never in a config."""

    prompt: str = _JUDGE_PROMPT
    """The judge's prompt; ``{prompt}``, ``{completion}`` and ``{answer}`` (the row's, or an empty text) are replaced.
    """

    score_pattern: str = r"[Ss]core:\s*(-?\d+(?:\.\d+)?)"
    """Pattern of the score in the judge's reply: the first group of the last match."""

    score_range: tuple[float, float] = (0.0, 10.0)
    """Lowest and highest score, which are scaled to 0 and 1. A score outside the range counts as missing."""

    unscored_reward: float | None = None
    """The value of answers without a score; by default a missing score is an error."""

    temperature: float = Field(default=0.0, ge=0)
    max_tokens: int = Field(default=512, ge=1)
    retries: int = Field(default=4, ge=0)
    """Maximum number of retries after time-outs, lost connections, and statuses 408, 409, 429 and 5xx, with exponential
    backoff."""

    timeout_seconds: float = Field(default=60.0, gt=0)
    workers: int = Field(default=8, ge=1, le=256)
    """Maximum concurrent requests."""

    cache: Path | None = None
    """A cache file for the judge's replies; by default they are cached in memory only."""

    @model_validator(mode="after")
    def _prompt_and_range_are_complete(self) -> JudgeConfig:
        if "{completion}" not in self.prompt:
            raise ValueError("prompt does not contain {completion}, so the judge would not see the answer")
        if not self.score_range[0] < self.score_range[1]:
            raise ValueError("score_range: the first number must be below the second")
        return self


class Judge(Grader):
    """Prompt a model for a score, extract it with a pattern, and scale it to the range 0 to 1.

    The judged answer is part of the prompt, so it can try to influence the judge: a policy trained against a judge
    learns what pleases it, right or not.
    """

    Settings = JudgeConfig
    config: JudgeConfig

    def __init__(self, config: JudgeConfig) -> None:
        super().__init__(config)
        require_package("openai", "graders[].grader: judge", "judge")
        self._key = from_environment(config.api_key_env, self.name, "api_key_env")
        try:
            self._pattern = regex.compile(config.score_pattern)
        except regex.error as error:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"graders: {self.name}: score_pattern is not a regular expression: {error}",
            ) from error
        if not self._pattern.groups:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"graders: {self.name}: score_pattern {config.score_pattern!r} has no group",
                "put the score's part in parentheses",
            )
        self._client: Any = None
        self._cache: ReplyCache | None = None

    def setup(self) -> None:
        from openai import OpenAI

        self._cache = ReplyCache(self.config.cache)
        self._client = OpenAI(
            api_key=self._key or "none",  # required by the client, ignored by local servers
            base_url=self.config.base_url,
            max_retries=self.config.retries,
            timeout=self.config.timeout_seconds,
        )

    def grade(self, samples: Sequence[Sample]) -> list[float]:
        requests = [self._request(sample) for sample in samples]
        different = {str(request): request for request in requests}
        with ThreadPoolExecutor(self.config.workers) as pool:
            scores = dict(zip(different, pool.map(self._score, different.values()), strict=True))
        return [scores[str(request)] for request in requests]

    def teardown(self) -> None:
        if self._client is not None:
            self._client.close()
        if self._cache is not None:
            self._cache.close()
        self._client = self._cache = None

    def _request(self, sample: Sample) -> dict[str, Any]:
        words = {
            "{prompt}": sample.prompt_text(),
            "{completion}": sample.completion,
            "{answer}": str(sample.row.get("answer") or ""),
        }
        # In one pass, so that braces inside an answer are not replaced.
        text = re.sub(r"\{(?:prompt|completion|answer)\}", lambda match: words[match[0]], self.config.prompt)
        return {
            "model": self.config.model,
            "messages": [{"role": "user", "content": text}],
            "temperature": self.config.temperature,
            "max_tokens": self.config.max_tokens,
        }

    def _score(self, request: dict[str, Any]) -> float:
        assert self._cache is not None  # set up
        key = {"base_url": self.config.base_url, **request}
        reply = self._cache.get(key)
        if reply is None:
            reply = self._ask(request)
            self._cache.put(key, reply)
        low, high = self.config.score_range
        score = self._parsed_score(reply)
        if score is not None and low <= score <= high:
            return (score - low) / (high - low)
        if self.config.unscored_reward is None:
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"grader {self.name}: {self.config.model} returned no score from {low:g} to {high:g}: {reply[-120:]!r}",
                "correct prompt, score_pattern or max_tokens, or set unscored_reward",
            )
        return self.config.unscored_reward

    def _parsed_score(self, reply: str) -> float | None:
        try:
            matches = list(self._pattern.finditer(reply, timeout=_SEARCH_SECONDS))
            return float(matches[-1][1]) if matches else None
        except (TypeError, ValueError):
            return None
        except TimeoutError as error:
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"grader {self.name}: score_pattern {self.config.score_pattern!r} takes more than "
                f"{_SEARCH_SECONDS:g} s for a reply of {counted(len(reply), 'character')}",
                "write it without repeats inside repeats",
            ) from error

    def _ask(self, request: dict[str, Any]) -> str:
        """Return the endpoint's reply, after the client's own retries."""
        from openai import APIConnectionError, APIStatusError, APITimeoutError, OpenAIError

        where = f"grader {self.name}: {self.config.base_url}"
        try:
            return str(self._client.chat.completions.create(**request).choices[0].message.content or "")
        except APITimeoutError as error:
            raise GymError(
                ErrorCode.DEADLINE_EXCEEDED, f"{where} did not answer in time", "raise timeout_seconds"
            ) from error
        except APIConnectionError as error:
            raise GymError(
                ErrorCode.UNAVAILABLE, f"{where} cannot be reached", "start the server, or correct base_url"
            ) from error
        except APIStatusError as error:
            refused = error.status_code in (401, 403)
            raise GymError(
                ErrorCode.UNAUTHENTICATED if refused else ErrorCode.UNAVAILABLE,
                f"{where} answered with status {error.status_code}",
                "set api_key_env to the variable that holds a valid key"
                if refused
                else "see the server's log",
            ) from error
        except (OpenAIError, AttributeError, IndexError, TypeError, ValueError) as error:
            raise GymError(
                ErrorCode.UNAVAILABLE,
                f"{where} did not answer as a chat completion ({type(error).__name__})",
                "set base_url to an OpenAI-compatible endpoint, such as http://localhost:8000/v1",
            ) from error


class ReplyCache:
    """A cache of replies by request in SQLite. Safe for threads and for processes that share the file.

    Args:
        path: The file, created with its folders if needed; None keeps replies in memory only.
    """

    def __init__(self, path: Path | None) -> None:
        self._lock = threading.Lock()
        try:
            if path is not None:
                path.expanduser().parent.mkdir(parents=True, exist_ok=True)
            self._store = sqlite3.connect(
                ":memory:" if path is None else path.expanduser(), timeout=30, check_same_thread=False
            )
            self._store.execute("PRAGMA journal_mode=WAL")
            self._store.execute(
                "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL)"
            )
            self._store.commit()
        except (OSError, sqlite3.Error) as error:
            raise GymError(
                ErrorCode.STATE_CORRUPT,
                f"judge: cache {path} cannot be used: {error}",
                "delete the file or choose another",
            ) from error

    def get(self, request: dict[str, Any]) -> str | None:
        """Return the cached reply to the same request; None if there is none."""
        with self._lock:
            row = self._store.execute("SELECT answer FROM answers WHERE key = ?", (key(request),)).fetchone()
        return None if row is None else str(row[0])

    def put(self, request: dict[str, Any], answer: str) -> None:
        """Store a reply."""
        with self._lock:
            self._store.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key(request), answer))
            self._store.commit()

    def close(self) -> None:
        """Close the file."""
        self._store.close()


def key(request: dict[str, Any]) -> str:
    """Return the SHA-256 of the request as canonical JSON."""
    return hashlib.sha256(json.dumps(request, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
