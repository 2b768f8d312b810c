"""Find differences between a fine-tune and its base other than weights, which a delta would lose.

A model whose ``rope_theta``, activation, norm epsilon or token ids differ from its base's cannot be represented as the
base plus a delta.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gym_fed.base.modeling.vocabulary import (
    ROLES,
    TokenChanges,
    text_tokenizer,
    token_changes,
    vocabulary_difference,
)
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted, plain

_NOT_COMPUTED = frozenset(
    {
        "architectures", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label",
        "initializer_range", "label2id", "max_position_embeddings", "model_type", "output_attentions",
        "output_hidden_states", "output_router_logits", "pad_token_id", "pretraining_tp", "problem_type",
        "quantization_config", "return_dict", "router_aux_loss_coef",
        "tie_word_embeddings", "torch_dtype", "transformers_version", "use_cache", "vocab_size",
    }
)  # fmt: skip
"""Config keys that do not affect the forward pass, or that are implied by the tensors' names and shapes."""
_PROBE = "The capital of Peru is Lima.\n  def f(x): return x**2 - 3.14\t¿Qué? 안녕 🏠 don't"
_SHOWN = 4
ALLOW = "--allow-differences"


@dataclass(frozen=True)
class Difference:
    """A setting in which a fine-tune differs from its base.

    Attributes:
        what: Config key with dots between nested keys, or ``tokenizer`` or ``chat template``.
        change: Both values, the base's first.
        computes: True if the model computes different results; False if only its prompts differ.
    """

    what: str
    change: str
    computes: bool = True

    def __str__(self) -> str:
        return f"{self.what}: {self.change}" if self.change else self.what


def require_same_settings(
    name: str,
    base: Any,
    tuned: Any,
    tokenizers: tuple[Any, Any] = (None, None),
    *,
    allow: bool = False,
    added_tokens: bool = False,
) -> list[Difference]:
    """Reject a fine-tune that differs from its base in more than weights.

    Args:
        name: Name of the fine-tune in errors.
        base: The base's model; only transformers models are compared.
        tuned: The fine-tune's model.
        tokenizers: Tokenizers of the base and the fine-tune, if both are known.
        allow: True to return differences instead of raising.
        added_tokens: True if added tokens are encoded too (``gym_fed.delta.vocabulary``), and so are no difference.

    Returns:
        Differences that a delta will not contain.

    Raises:
        GymError: ``BASE_MISMATCH`` with the settings and both values.
    """
    differences = [
        *_config_differences(getattr(base, "config", None), getattr(tuned, "config", None)),
        *_tokenizer_differences(*tokenizers, added_tokens),
    ]
    computed = [str(difference) for difference in differences if difference.computes]
    if computed and not allow:
        more = f" and {len(computed) - _SHOWN} more" if len(computed) > _SHOWN else ""
        raise GymError(
            ErrorCode.BASE_MISMATCH,
            f"{name} differs from its base in more than weights: {'; '.join(computed[:_SHOWN])}{more}",
            f"a delta contains only weights, so base + delta would be a different model; to continue anyway: {ALLOW}",
        )
    return differences


def _config_differences(base: Any, tuned: Any) -> Iterator[Difference]:
    if not (hasattr(base, "to_dict") and hasattr(tuned, "to_dict")):
        return
    if base.model_type != tuned.model_type:
        yield Difference("model_type", f"{base.model_type} -> {tuned.model_type}")
        return
    old, new = (dict(_flat(config.to_dict())) for config in (base, tuned))
    if not old.get("use_sliding_window", True) and not new.get("use_sliding_window", True):
        for key in (
            "max_window_layers",
            "sliding_window",
        ):  # unused then, and different between model families
            old.pop(key, None)
            new.pop(key, None)
    for key in sorted(old.keys() & new.keys() | {key for key in old.keys() ^ new.keys() if "rope" in key}):
        if old.get(key) != new.get(key):
            yield Difference(key, f"{old.get(key)} -> {new.get(key)}"[:200])


def _flat(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        key = str(key)  # Aria counts queries by the number of patches
        if key in _NOT_COMPUTED or key.startswith("_") or "dropout" in key:
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def tokenizer_difference(base: Any, tuned: Any) -> str:
    """Describe the first token of the base that has another id in a fine-tune's tokenizer; empty if there is none."""
    changed = vocabulary_difference(base, tuned).changed
    if not changed:
        return ""
    number, (token, other) = next(iter(changed.items()))
    size = len(text_tokenizer(base).get_vocab())
    return (
        f"different ids for {len(changed)} of {counted(size, 'token')}, the first is {plain(token, 40)!r}: "
        f"{number} -> {'absent' if other is None else other}"
    )


def _tokenizer_differences(base: Any, tuned: Any, added_tokens: bool) -> Iterator[Difference]:
    base, tuned = text_tokenizer(base), text_tokenizer(tuned)
    if base is None or tuned is None:
        return
    added = vocabulary_difference(base, tuned).added
    if other := tokenizer_difference(base, tuned):
        yield Difference("tokenizer", other)
    elif (ids := base(_PROBE)["input_ids"]) != (others := tuned(_PROBE)["input_ids"]):
        pairs = enumerate(zip(ids, others, strict=False))
        position = next((n for n, (a, b) in pairs if a != b), min(len(ids), len(others)))
        yield Difference("tokenizer", f"the same text gives different token ids from position {position} on")
    elif added and not added_tokens:
        token, number = next((token, number) for number, token in added.items())
        yield Difference(
            "tokenizer", f"{counted(len(added), 'added token')}, the first is {plain(token, 40)!r} ({number})"
        )
    if base.chat_template != tuned.chat_template:
        yield Difference("chat template", "", computes=False)
    if added and added_tokens and not other:
        return  # the tokens are encoded with their roles and properties
    for role in ROLES:
        old, new = getattr(base, role, None), getattr(tuned, role, None)
        if new is not None and str(old) != str(new):
            what = "end token" if role == "eos_token" else role.replace("_", " ")
            yield Difference(what, f"{old} -> {new}", computes=False)
    changes = TokenChanges() if added or other else token_changes(base, tuned, "the fine-tune")
    if changes.changed:
        first = plain(changes.changed[0][1], 40)
        what = f"properties of {counted(len(changes.changed), 'token')}"
        yield Difference(what, f"the first is {first!r}", computes=False)
