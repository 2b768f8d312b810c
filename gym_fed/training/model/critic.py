"""PPO's critic: a transformer's body with a scalar head that estimates the future reward at every token.

The critic has a separate body, for two reasons: its loss would change a shared body, and with an adapter or a quantised
base there is no body to train. The body starts as a copy of the policy's, or from the model that ``ppo.critic``
specifies, such as the reward model. The head starts at zero.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from gym_fed.base.modeling.adapters import merged
from gym_fed.base.modeling.loading import load_weights
from gym_fed.base.models import load_model, quiet_loading, resolve
from gym_fed.core.errors import ErrorCode, GymError, refuse_first
from gym_fed.core.text import counted

_HEAD = "value_head.safetensors"


class Critic(torch.nn.Module):
    """A model that estimates a value for every token of an answer.

    Args:
        body: A ``transformers`` model without a head.
        train_body: True to train the body, too; False to train only the head.
    """

    def __init__(self, body: Any, *, train_body: bool = True) -> None:
        super().__init__()
        self.body = body.requires_grad_(train_body)
        weights = next(body.parameters())
        width = body.config.get_text_config().hidden_size
        self.head = torch.nn.Linear(width, 1, device=weights.device, dtype=weights.dtype)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return the value before each of the last ``num_tokens`` tokens, ``[B, num_tokens]`` float32."""
        body: Any = self.body
        hidden = body(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        values: torch.Tensor = self.head(hidden[:, -num_tokens - 1 : -1])
        return values.squeeze(-1).float()

    def save_pretrained(self, folder: Path) -> None:
        """Write a folder that ``ppo.critic`` accepts: the body in transformers' format, and the head."""
        body: Any = self.body
        body.save_pretrained(str(folder))
        save_file(dict(self.head.state_dict()), folder / _HEAD)


def critic_like(policy: Any, *, train_body: bool) -> Critic:
    """Build a critic whose body is a copy of the policy's, with adapters merged.

    Args:
        policy: A causal LM or a PEFT model around one; not changed.
        train_body: See ``Critic``.
    """
    model = merged(copy.deepcopy(policy))
    return Critic(model.base_model, train_body=train_body)


def load_critic(name: str, policy: Any, *, dtype: str, train_body: bool) -> Critic:
    """Load a critic from the model that ``ppo.critic`` specifies, with its value head if there is one.

    Raises:
        GymError: ``MODEL_NOT_FOUND``; ``MODEL_INVALID``; ``CONFIG_INVALID`` if the vocabulary differs from the
            policy's.
    """
    folder = Path(resolve(name))
    if (folder / "adapter_config.json").is_file():
        body = merged(load_model(name, dtype=dtype, headless=True).model, name).base_model
    else:
        from transformers import AutoModel

        label, arguments = f"ppo.critic: {name}", {"dtype": getattr(torch, dtype)}
        try:
            with quiet_loading():
                body = load_weights(AutoModel, str(folder), arguments, name=label, headless=True)
        except (OSError, ValueError) as error:
            raise GymError(ErrorCode.MODEL_INVALID, f"{label} cannot be read as a model: {error}") from error
    sizes = [int(model.get_input_embeddings().num_embeddings) for model in (body, policy)]
    reason = f"ppo.critic: {name} has {counted(sizes[0], 'token')}, but the policy has {sizes[1]}"
    remedy = "use a model with the policy's tokenizer, or remove the key"
    refuse_first((sizes[0] != sizes[1], reason, remedy))
    critic = Critic(body.to(next(policy.parameters()).device), train_body=train_body)
    if (folder / _HEAD).is_file():
        critic.head.load_state_dict(load_file(folder / _HEAD))
    return critic
