"""Rollouts in a multi-turn environment: the model and the environment take turns, and only the model's tokens train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.environments import STATE, Environment, Message, State

_MARK = "the answer of a probe"


class Conversation:
    """One conversation of the model with an environment.

    Attributes:
        prompt_ids: The token ids of the prompt.
        ids: Those of all turns after it.
        mask: 1 for the model's tokens, 0 for the environment's.
        logprobs: Log-probabilities when they were sampled, 0 for the environment's tokens; empty if not reported.
        state: The environment's state.
        is_over: True if no further answer is wanted.
    """

    def __init__(self, prompt_ids: list[int], state: State) -> None:
        self.prompt_ids, self.state = prompt_ids, state
        self.ids: list[int] = []
        self.mask: list[int] = []
        self.logprobs: list[float] = []
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
        encoded, *_ = trainer._tokenize_prompts(prompts)
        conversations = [
            Conversation(list(ids), self._environment.begin(prompt, self._rows[place]))
            for ids, prompt, place in zip(encoded, prompts, self.places, strict=True)
        ]
        are_reported = False
        while open_ones := [one for one in conversations if not one.is_over]:
            contexts = [[*one.prompt_ids, *one.ids] for one in open_ones]
            answers, logprobs = trainer._generate_single_turn(contexts, None, {}, 1)
            for place, (one, answer) in enumerate(zip(open_ones, answers, strict=True)):
                if are_reported := logprobs is not None:
                    one.logprobs += [0.0] * (len(one.ids) - len(one.logprobs)) + logprobs[place]
                self._take(one, list(answer), trainer)
                del one.logprobs[len(one.ids) :]
        return {
            "prompt_ids": [one.prompt_ids for one in conversations],
            "completion_ids": [one.ids for one in conversations],
            "env_mask": [one.mask for one in conversations],
            "logprobs": [one.logprobs for one in conversations] if are_reported else None,
            STATE: [one.state for one in conversations],
        }

    def _take(self, one: Conversation, answer: list[int], trainer: Any) -> None:
        """Add an answer, and the environment's messages to it if they leave room for another."""
        tokenizer = trainer.processing_class
        answer = answer[: self._most - len(one.ids)]
        one.add(answer, of_model=True)
        messages = self._environment.respond(
            one.state, str(tokenizer.decode(answer, skip_special_tokens=True))
        )
        end = answer[-1] if answer and answer[-1] in trainer.eos_token_ids else None
        following = _between(tokenizer, messages, end) if messages else []
        if following and len(one.ids) + len(following) < self._most:
            one.add(following, of_model=False)
            return
        one.is_over = True
        if messages:  # the model has not seen them, and the rubric must not mistake them for its last answer
            del one.state["completion"][-len(messages) :]


def _between(tokenizer: Any, messages: list[Message], end: int | None) -> list[int]:
    """Return the tokens that the template writes from the end of an answer to the beginning of the next.

    Control tokens in the messages are encoded as plain text, as by ``sanitize_control_tokens=True`` of transformers.

    Args:
        end: The end token that the model has written itself, if it has.

    Raises:
        GymError: ``MODEL_INVALID`` for a template that does not write an answer's text.
    """
    from transformers.utils import chat_template_utils as theirs

    control = tokenizer._get_control_tokens(tokenizer.get_chat_template())
    messages = theirs.mark_control_tokens(messages, theirs._get_control_token_patterns(control)[0])
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _MARK}, *messages]
    rendered = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    _, found, after = rendered.partition(_MARK)
    if not found:
        raise GymError(
            ErrorCode.MODEL_INVALID,
            "the chat template does not keep the text of an answer that another turn follows",
            "use a chat template that supports several turns",
        )
    if end is not None:
        after = after.removeprefix(str(tokenizer.decode([end])))
    return list(theirs.encode_marked_chat(tokenizer, after))
