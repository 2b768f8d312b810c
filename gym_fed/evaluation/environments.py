"""Multi-turn environments that follow the verifiers protocol, as graders for training with rewards.

An environment responds to each answer of the model until the conversation is complete, and its rubric scores the
conversation. Any object with these attributes works; the package itself is not needed
(https://docs.primeintellect.ai/verifiers, version 0):

- ``env_response(messages, state)``: the next messages, or these and the state;
- ``rubric.funcs`` and ``rubric.weights``: reward functions and their weights (1 each by default). A function gets those
  of ``prompt``, ``completion``, ``answer``, ``info``, ``task``, ``state`` and ``parser`` that it names; ``parser`` is
  an attribute of the rubric, or else of the environment;
- optionally ``is_completed(messages, state)`` or ``is_completed(state)``, ``setup_state(state)``, ``max_turns``.

All of these functions may be async; one event loop per environment runs them, so that they can reuse clients.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import threading
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.evaluation.graders.base import Grader, Sample

STATE = "environment_state"
"""The column of a sample's row with the state after a conversation in the environment."""

MAX_TURNS = 32
"""Maximum number of answers of one conversation, also for an environment without a limit."""

Message = dict[str, Any]
State = dict[str, Any]

_OF_TURNS = ("messages", "state")
_OF_REWARDS = ("prompt", "completion", "answer", "info", "task", "state", "parser")


class Environment(Grader):
    """An environment whose rubric is the reward.

    Args:
        environment: The object; see the module.
        name: Name of the reward in metrics.

    Raises:
        GymError: ``USAGE`` naming the attribute that the object lacks, or a parameter that no value is known for.
    """

    def __init__(self, environment: Any, name: str = "environment") -> None:
        super().__init__()
        self.name = name
        self._environment = environment
        rubric = getattr(environment, "rubric", None)
        funcs = getattr(rubric, "funcs", None) or getattr(rubric, "reward_funcs", None)
        weights = getattr(rubric, "weights", None) or getattr(rubric, "reward_weights", None)
        for present, attribute in (
            (callable(getattr(environment, "env_response", None)), "env_response"),
            (bool(funcs), "rubric.funcs"),
        ):
            if not present:
                raise GymError(
                    ErrorCode.USAGE,
                    f"{type(environment).__name__} is not an environment: it has no {attribute}",
                    "pass an object that follows the verifiers protocol (docs/algorithms.md)",
                )
        self._funcs: list[Callable[..., Any]] = list(funcs or ())
        self._weights = [float(weight) for weight in weights or [1.0] * len(self._funcs)]
        if len(self._weights) != len(self._funcs):
            raise GymError(
                ErrorCode.USAGE,
                f"{name}: {counted(len(self._funcs), 'reward function')} and {counted(len(self._weights), 'weight')}",
            )
        self._parser = getattr(rubric, "parser", None) or getattr(environment, "parser", None)
        for attribute, known in (
            ("env_response", _OF_TURNS),
            ("is_completed", _OF_TURNS),
            ("setup_state", ("state",)),
        ):
            if callable(function := getattr(environment, attribute, None)):
                _require_known_parameters(function, known)
        for function in self._funcs:
            _require_known_parameters(function, _OF_REWARDS)
        turns = int(getattr(environment, "max_turns", MAX_TURNS) or MAX_TURNS)
        self.max_turns = turns if 0 < turns <= MAX_TURNS else MAX_TURNS

    def begin(self, prompt: Sequence[Message], row: Mapping[str, Any]) -> State:
        """Create the state of a conversation; it shares nothing with the row or with other conversations."""
        state: State = {
            "prompt": copy.deepcopy(list(prompt)),
            "completion": [],
            "answer": copy.deepcopy(row.get("answer", "")),
            "info": copy.deepcopy(row.get("info") or {}),
            "task": row.get("task", "default"),
            "turn": 0,
        }
        if callable(setup := getattr(self._environment, "setup_state", None)):
            state = self._result(setup, {"state": state}) or state
        return state

    def respond(self, state: State, answer: str) -> list[Message]:
        """Add an answer, and return the environment's reply; empty if the conversation is over."""
        state["completion"].append({"role": "assistant", "content": answer})
        state["turn"] += 1
        known = {"messages": [*state["prompt"], *state["completion"]], "state": state}
        if state["turn"] >= self.max_turns:
            return []
        completed = getattr(self._environment, "is_completed", None)
        if callable(completed) and self._result(completed, known):
            return []
        response = self._result(self._environment.env_response, known)
        if isinstance(response, tuple):
            response, changed = response
            if changed is not state:
                state.update(changed)
        if isinstance(response, str):
            response = [{"role": "user", "content": response}]
        messages = [{**message, "content": self._text(message)} for message in response or ()]
        state["completion"] += messages
        return messages

    def grade(self, samples: Sequence[Sample]) -> list[float]:
        """Score conversations by the rubric; an answer without a conversation counts as its only turn."""
        return [self._score(sample.row.get(STATE) or self._single_turn(sample)) for sample in samples]

    def _single_turn(self, sample: Sample) -> State:
        prompt = sample.prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        state = self.begin(messages, sample.row)
        state["completion"].append({"role": "assistant", "content": sample.completion})
        return state

    def _score(self, state: State) -> float:
        known = {
            **{key: state[key] for key in ("prompt", "completion", "answer", "info", "task")},
            "state": state,
            "parser": self._parser,
        }
        values = (float(self._result(func, known)) for func in self._funcs)
        return sum(weight * value for weight, value in zip(self._weights, values, strict=True))

    def _text(self, message: Message) -> str:
        """Return the text of an environment's message, whose content may be a list of text parts."""
        content = message.get("content")
        if content is None:
            return ""
        if isinstance(content, str):
            return content
        parts = content if isinstance(content, list) else [content]
        for part in parts:
            if not isinstance(part, Mapping) or part.get("type") != "text":
                raise GymError(
                    ErrorCode.USAGE,
                    f"{self.name}: env_response returned a {message.get('role')} message whose content has "
                    f"{_described(part)}",
                    "return text, or a list of text parts",
                )
        return "".join(str(part.get("text") or "") for part in parts)

    def _result(self, function: Callable[..., Any], known: Mapping[str, Any]) -> Any:
        """Call a function with the arguments of ``known`` that it accepts, and await it if it is async."""
        parameters = inspect.signature(function).parameters.values()
        if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
            arguments = dict(known)
        else:
            arguments = {
                parameter.name: known[parameter.name] for parameter in parameters if parameter.name in known
            }
        result = function(**arguments)
        if not inspect.isawaitable(result):
            return result
        return asyncio.run_coroutine_threadsafe(_awaited(result), self._loop).result()

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of all async functions, since a client that they reuse belongs to one loop.

        It runs in a thread, since the caller's thread may have a running loop, as in a notebook.
        """
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, name="gym-environment", daemon=True).start()
        weakref.finalize(self, loop.call_soon_threadsafe, loop.stop)
        return loop


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def _described(part: Any) -> str:
    return f"a part of type {part.get('type')!r}" if isinstance(part, Mapping) else f"a {type(part).__name__}"


def _require_known_parameters(function: Callable[..., Any], known: Sequence[str]) -> None:
    """Refuse a function with a required parameter outside ``known`` before anything is generated."""
    for parameter in inspect.signature(function).parameters.values():
        is_variadic = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        by_name = parameter.kind is not inspect.Parameter.POSITIONAL_ONLY and parameter.name in known
        if parameter.default is inspect.Parameter.empty and not is_variadic and not by_name:
            raise GymError(
                ErrorCode.USAGE,
                f"{getattr(function, '__qualname__', function)} requires the parameter {parameter.name}, which is "
                "not available",
                f"use {', '.join(known)}, or give it a default",
            )
