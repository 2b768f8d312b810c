"""What a hub with differential privacy must not do: everything that would tell of an update past the noise.

Each is refused where the config is read, with the reason and with what to write instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gym_fed.config.server import ServerConfig


def check_private(config: ServerConfig) -> None:
    """Raises ``ValueError`` with every key that does not go with ``privacy``."""
    if config.privacy is None:
        return
    problems = list(_problems(config))
    if problems:
        raise ValueError("privacy promises that only noised sums are seen: " + "; ".join(problems))


def _problems(config: ServerConfig) -> Iterator[str]:
    if config.admission.norm_ratio is not None:
        yield (
            "admission.norm_ratio rejects an update by the norms of all, and who is rejected is seen; write "
            "admission: {norm_ratio: null} (privacy.clipping_norm limits what one can do)"
        )
    if config.admission.max_norm is not None:
        yield "admission.max_norm refuses by an update's norm; write admission: {max_norm: null}"
    if config.gate.screen_updates:
        yield (
            "gate.screen_updates rejects by what single updates do to the held-out loss; write gate: {screen_updates: "
            "false} (the gate still tries the soup, which is noised)"
        )
    if config.root is not None:
        yield "root weighs updates by how they lie to the root update; remove it"
    if config.recipe.finetuning == "lora" and not config.recipe.lora.freeze_a:
        yield (
            "recipe.finetuning lora trains two factors, and noise on both is multiplied with itself; write "
            "recipe: {lora: {freeze_a: true}}, or finetuning: full"
        )
    try:
        config.rewards.refuse_hidden("privacy")
    except ValueError as error:
        yield str(error)
    assert config.privacy is not None
    try:
        config.privacy.refuse_unaccounted(config.soup)
    except ValueError as error:
        yield str(error)
