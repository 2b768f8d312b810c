"""Generate rollouts in a multi-turn environment; only the model's tokens are trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.environments import STATE, Environment, Message, State

_MARK = "the answer of a probe"


class Conversation:
    """A conversation between the model and an environment.

    Attributes:
        prompt_ids: The token ids of the prompt.
        ids: The token ids of all turns after the prompt.
        mask: 1 for the model's tokens, 0 for the environment's.
        logprobs: Log-probabilities at sampling, 0 for the environment's tokens; empty if they are not reported.
        state: The state of the environment.
        is_over: True if no further answer is needed.
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
        max_tokens: Maximum number of tokens over all turns of a conversation.

    Attributes:
        row_indices: The row of each prompt in the next call; set by the trainer.
    """

    def __init__(self, environment: Environment, rows: Sequence[Mapping[str, Any]], max_tokens: int) -> None:
        self._environment, self._rows, self._max_tokens = environment, rows, max_tokens
        self.row_indices: list[int] = []

    def __call__(self, prompts: list[list[Message]], trainer: Any) -> dict[str, Any]:
        """Answer prompts turn by turn; each turn generates the answers of all open conversations in one batch."""
        encoded, *_ = trainer._tokenize_prompts(prompts)
        conversations = [
            Conversation(list(ids), self._environment.begin(prompt, self._rows[index]))
            for ids, prompt, index in zip(encoded, prompts, self.row_indices, strict=True)
        ]
        are_reported = False
        while active := [c for c in conversations if not c.is_over]:
            contexts = [[*c.prompt_ids, *c.ids] for c in active]
            answers, logprobs = trainer._generate_single_turn(contexts, None, {}, 1)
            for i, (conversation, answer) in enumerate(zip(active, answers, strict=True)):
                if are_reported := logprobs is not None:
                    padding = [0.0] * (len(conversation.ids) - len(conversation.logprobs))
                    conversation.logprobs += padding + logprobs[i]
                self._add_turn(conversation, list(answer), trainer)
                del conversation.logprobs[len(conversation.ids) :]
        return {
            "prompt_ids": [c.prompt_ids for c in conversations],
            "completion_ids": [c.ids for c in conversations],
            "env_mask": [c.mask for c in conversations],
            "logprobs": [c.logprobs for c in conversations] if are_reported else None,
            STATE: [c.state for c in conversations],
        }

    def _add_turn(self, conversation: Conversation, answer: list[int], trainer: Any) -> None:
        """Add an answer, and the environment's response if there is room for a further answer after it."""
        tokenizer = trainer.processing_class
        answer = answer[: self._max_tokens - len(conversation.ids)]
        conversation.add(answer, of_model=True)
        text = str(tokenizer.decode(answer, skip_special_tokens=True))
        messages = self._environment.respond(conversation.state, text)
        end = answer[-1] if answer and answer[-1] in trainer.eos_token_ids else None
        following = _between(tokenizer, messages, end) if messages else []
        if following and len(conversation.ids) + len(following) < self._max_tokens:
            conversation.add(following, of_model=False)
            return
        conversation.is_over = True
        if messages:  # the model has not seen them, and the rubric must not treat them as its last answer
            del conversation.state["completion"][-len(messages) :]


def _between(tokenizer: Any, messages: list[Message], end: int | None) -> list[int]:
    """Return the tokens that the template writes between the end of an answer and the start of the next one.

    Control tokens in the messages are encoded as plain text, as with transformers' ``sanitize_control_tokens=True``.

    Args:
        end: The end token that the model has generated; None if it has generated none.

    Raises:
        GymError: ``MODEL_INVALID`` for a template that does not render an answer's text.
    """
    from transformers.utils import chat_template_utils as templates

    control = tokenizer._get_control_tokens(tokenizer.get_chat_template())
    messages = templates.mark_control_tokens(messages, templates._get_control_token_patterns(control)[0])
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _MARK}, *messages]
    rendered = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    _, found, after = rendered.partition(_MARK)
    if not found:
        raise GymError(
            ErrorCode.MODEL_INVALID,
            "the chat template drops the text of an answer that is followed by another turn",
            "use a chat template that supports several turns",
        )
    if end is not None:
        after = after.removeprefix(str(tokenizer.decode([end])))
    return list(templates.encode_marked_chat(tokenizer, after))
