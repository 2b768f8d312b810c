"""Rollouts in a multi-turn environment: the model and the environment take turns, and only the model's tokens train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gym_fed.evaluation.environments import STATE, Environment, Message, State

_MARK = "the answer of a probe"


class Conversation:
    """One conversation of the model with an environment.

    Attributes:
        prompt_ids: The token ids of the prompt.
        ids: Those of all turns after it.
        mask: 1 for the model's tokens, 0 for the environment's.
        state: The environment's state.
        is_over: True if no further answer is wanted.
    """

    def __init__(self, prompt_ids: list[int], state: State) -> None:
        self.prompt_ids, self.state = prompt_ids, state
        self.ids: list[int] = []
        self.mask: list[int] = []
        self.is_over = False

    def add(self, ids: Sequence[int], *, of_model: bool) -> None:
        self.ids += ids
        self.mask += [int(of_model)] * len(ids)


class EnvironmentRollouts:
    """A ``rollout_func`` of TRL's ``GRPOTrainer``.

    Args:
        environment: The environment.
        rows: All rows, indexed by the dataset's column ``row``.
        most: Maximum tokens of all turns of a conversation.

    Attributes:
        places: The rows of the next call's prompts; set by the trainer.
    """

    def __init__(self, environment: Environment, rows: Sequence[Mapping[str, Any]], most: int) -> None:
        self._environment, self._rows, self._most = environment, rows, most
        self.places: list[int] = []

    def __call__(self, prompts: list[list[Message]], trainer: Any) -> dict[str, Any]:
        """Answer prompts, turn by turn; all open conversations are answered in one batch."""
        tokenizer = trainer.processing_class
        encoded, *_ = trainer._tokenize_prompts(prompts)
        conversations = [
            Conversation(list(ids), self._environment.begin(prompt, self._rows[place]))
            for ids, prompt, place in zip(encoded, prompts, self.places, strict=True)
        ]
        while open_ones := [one for one in conversations if not one.is_over]:
            contexts = [[*one.prompt_ids, *one.ids] for one in open_ones]
            answers, _ = trainer._generate_single_turn(contexts, None, {}, 1)
            for one, answer in zip(open_ones, answers, strict=True):
                self._take(one, list(answer), tokenizer)
        return {
            "prompt_ids": [one.prompt_ids for one in conversations],
            "completion_ids": [one.ids for one in conversations],
            "env_mask": [one.mask for one in conversations],
            "logprobs": None,
            STATE: [one.state for one in conversations],
        }

    def _take(self, one: Conversation, answer: list[int], tokenizer: Any) -> None:
        """Add an answer, and the environment's messages to it if they leave room for another."""
        answer = answer[: self._most - len(one.ids)]
        one.add(answer, of_model=True)
        text = str(tokenizer.decode(answer, skip_special_tokens=True))
        messages = self._environment.respond(one.state, text)
        has_ended = bool(answer) and answer[-1] == tokenizer.eos_token_id
        following = _between(tokenizer, messages, has_ended=has_ended) if messages else []
        if following and len(one.ids) + len(following) < self._most:
            one.add(following, of_model=False)
        else:
            one.is_over = True


def _between(tokenizer: Any, messages: list[Message], *, has_ended: bool) -> list[int]:
    """Return the tokens that the template writes from the end of an answer to the beginning of the next."""
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _MARK}, *messages]
    rendered = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    after = rendered.rpartition(_MARK)[2] if _MARK not in str(messages) else rendered.partition(_MARK)[2]
    if has_ended:  # the model has written the end token itself
        after = after.removeprefix(tokenizer.eos_token or "")
    return list(tokenizer(after, add_special_tokens=False)["input_ids"])
