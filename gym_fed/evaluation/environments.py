"""Multi-turn environments by the protocol of the package verifiers, as graders of training with rewards.

An environment answers each answer of the model, until it is completed; its rubric scores the conversation. Any object
with these attributes is one; the package itself is not needed (https://docs.primeintellect.ai/verifiers, version 0):

- ``env_response(messages, state)``: the next messages, or these and the state;
- ``rubric.funcs`` and ``rubric.weights``: reward functions, called with those of ``prompt``, ``completion``,
  ``answer``, ``info``, ``task`` and ``state`` that they name, and their weights (1 each by default);
- optionally ``is_completed(messages, state)`` or ``is_completed(state)``, ``setup_state(state)``, ``max_turns``.

Every one of these functions may be async.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.graders.base import Grader, Sample

STATE = "environment_state"
"""The column of a sample's row with the state after a conversation in the environment."""

MAX_TURNS = 32
"""Maximum answers of one conversation, also for an environment without a limit."""

Message = dict[str, Any]
State = dict[str, Any]


class Environment(Grader):
    """An environment, whose rubric is the reward.

    Args:
        environment: The object; see the module.
        name: Name of the reward in metrics.

    Raises:
        GymError: ``USAGE`` naming the attribute that the object lacks.
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
                    f"{type(environment).__name__} is no environment: it has no {attribute}",
                    "give an object by the protocol of verifiers (docs/algorithms.md)",
                )
        self._funcs: list[Callable[..., Any]] = list(funcs or ())
        self._weights = [float(weight) for weight in weights or [1.0] * len(self._funcs)]
        if len(self._weights) != len(self._funcs):
            raise GymError(
                ErrorCode.USAGE,
                f"{name}: {len(self._funcs)} reward functions and {len(self._weights)} weights",
            )
        turns = int(getattr(environment, "max_turns", MAX_TURNS) or MAX_TURNS)
        self.max_turns = turns if 0 < turns <= MAX_TURNS else MAX_TURNS

    def begin(self, prompt: Sequence[Message], row: Mapping[str, Any]) -> State:
        """Create the state of a conversation."""
        state: State = {
            "prompt": list(prompt),
            "completion": [],
            "answer": row.get("answer", ""),
            "info": row.get("info") or {},
            "task": row.get("task", "default"),
            "turn": 0,
        }
        if callable(setup := getattr(self._environment, "setup_state", None)):
            state = _result(setup, {"state": state}) or state
        return state

    def respond(self, state: State, answer: str) -> list[Message]:
        """Add an answer, and return the environment's messages to it; none if the conversation is over."""
        state["completion"].append({"role": "assistant", "content": answer})
        state["turn"] += 1
        known = {"messages": [*state["prompt"], *state["completion"]], "state": state}
        if state["turn"] >= self.max_turns:
            return []
        completed = getattr(self._environment, "is_completed", None)
        if callable(completed) and _result(completed, known):
            return []
        response = _result(self._environment.env_response, known)
        if isinstance(response, tuple):
            response, changed = response
            if changed is not state:
                state.update(changed)
        if isinstance(response, str):
            response = [{"role": "user", "content": response}]
        messages = [{**message, "content": str(message["content"])} for message in response or ()]
        state["completion"] += messages
        return messages

    def grade(self, samples: Sequence[Sample]) -> list[float]:
        """Score conversations by the rubric; an answer without a conversation is the only turn of one."""
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
        }
        values = (float(_result(func, known)) for func in self._funcs)
        return sum(weight * value for weight, value in zip(self._weights, values, strict=True))


def _result(function: Callable[..., Any], known: Mapping[str, Any]) -> Any:
    """Call a function with those of ``known`` that it names, and wait for it if it is async."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        arguments = dict(known)
    else:
        arguments = {one.name: known[one.name] for one in parameters if one.name in known}
    result = function(**arguments)
    if not inspect.isawaitable(result):
        return result

    async def waited() -> Any:
        return await result

    with ThreadPoolExecutor(
        1
    ) as thread:  # the caller's thread may have a running event loop, as in a notebook
        return thread.submit(asyncio.run, waited()).result()
