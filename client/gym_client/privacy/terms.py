"""Privacy terms of a hub: the cost of a round, the hub's promises, and their check against the policy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gym_client.hub.replies import parse_object
from gym_client.privacy.book import Charge, PrivacyBook, now
from gym_fed.config.hub.task import TrainingRecipe
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted, plain, quoted
from gym_fed.privacy.secure_aggregation.messages import MAX_CONTRIBUTORS

if TYPE_CHECKING:
    from gym_client.agent.policy import Policy
    from gym_fed.config.hub.privacy import SecureTask
    from gym_fed.delta.base import BaseSpec
    from gym_fed.training.private.plan import Plan


_PER_CONTRIBUTOR_BYTES = 1000
"""Bytes of messages per other contributor, rounded up: sealed shares, commitments and revealed shares."""


@dataclass(frozen=True)
class SecureTerms:
    """The terms of a hub's secure rounds.

    Attributes:
        threshold: Minimum number of contributors that must stay until the end, as announced by the hub.
    """

    threshold: int

    @classmethod
    def parse(cls, text: str) -> SecureTerms | None:
        """Parse ``StatusReply.privacy_json``. Return None for a hub that sees every update.

        Raises:
            GymError: ``POLICY_REFUSED`` if the hub does not announce its threshold.
        """
        promised = parse_object(text, "a privacy promise", ErrorCode.POLICY_REFUSED) if text else None
        terms = promised.get("secure_aggregation") if isinstance(promised, dict) else None
        if not terms:
            return None
        threshold = terms.get("threshold") if isinstance(terms, dict) else None
        if not isinstance(threshold, int) or not 2 <= threshold <= MAX_CONTRIBUTORS // 2:
            raise GymError(
                ErrorCode.POLICY_REFUSED,
                "the server claims secure aggregation, but does not state its threshold",
                "update gym-fed, or report it to the coordinator",
            )
        return cls(threshold)

    @property
    def most(self) -> int:
        """Maximum contributors of a round; more could be split into two groups by the hub, see ``check_majority``."""
        return 2 * self.threshold - 1

    def update_bytes(self, base: BaseSpec) -> int:
        """Return the size in bytes of masked votes, for the maximum number of contributors."""
        from gym_fed.privacy.secure_aggregation.votes import bits_for, masked_bytes

        return masked_bytes(base, bits_for(self.most))

    @property
    def message_bytes(self) -> int:
        """Maximum size in bytes of all other messages of a round."""
        return _PER_CONTRIBUTOR_BYTES * self.most


@dataclass(frozen=True)
class Promises:
    """A hub's privacy promises from ``StatusReply.privacy_json``.

    Attributes:
        central: The hub's own contributor-level differential privacy (budget, spending, adjacency); None if the hub has
            none.
        secure_aggregation: True if the hub learns only sums of updates.
        threshold: Minimum number of updates in a sum; 0 if the hub sees each update.
    """

    central: dict[str, Any] | None = None
    secure_aggregation: bool = False
    threshold: int = 0

    @classmethod
    def parse(cls, text: str) -> Promises:
        """Parse the promises in a hub's status; an empty text means no promises.

        Raises:
            GymError: ``POLICY_REFUSED`` if the text is invalid.
        """
        try:
            document = parse_object(text or "{}", "a privacy promise", ErrorCode.POLICY_REFUSED)
            central = document.get("central") or None
            if central is not None:
                budget, delta = float(central["epsilon"]), float(central["target_delta"])
                if not (0 < budget < math.inf and 0 < delta < 1):  # also excludes NaN
                    raise ValueError(f"epsilon {budget:g} at delta {delta:g}")
                if not isinstance(central["aggregator"], str):
                    raise TypeError(f"aggregator {plain(repr(central['aggregator']), 40)}")
            secure = SecureTerms.parse(text)
            return cls(central, secure is not None, secure.threshold if secure else 0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise GymError(
                ErrorCode.POLICY_REFUSED,
                f"the server's privacy promise is invalid: {error!r}",
                "update gym-fed, or report it to the coordinator",
            ) from error

    @property
    def hub_epsilon(self) -> float:
        """The epsilon of the hub's own privacy budget; infinite if it has none."""
        return math.inf if self.central is None else float(self.central["epsilon"])

    @property
    def hub_delta(self) -> float:
        """The delta of the hub's own privacy budget; infinite if it has none."""
        return math.inf if self.central is None else float(self.central["target_delta"])


@dataclass(frozen=True)
class PrivacyTerms:
    """The privacy terms that are displayed before joining.

    Attributes:
        epsilon_per_round: Epsilon of an example in one round; None without ``recipe.privacy`` (infinite).
        epsilon_after_all: Epsilon after ``num_rounds`` rounds of this hub alone.
        epsilon_spent: Epsilon that was already spent on this data across all hubs.
        epsilon_with_spent: Epsilon across all hubs after all rounds of this hub.
        target_delta: Delta of these epsilons.
        num_rounds: Number of rounds of the hub.
        local: Privacy settings of the recipe.
        central: The hub's promise of contributor-level privacy.
        threshold: Minimum number of updates in a sum; 0 if the hub sees each update.
    """

    epsilon_per_round: float | None
    epsilon_after_all: float | None
    epsilon_spent: float
    epsilon_with_spent: float | None
    target_delta: float | None
    num_rounds: int
    local: dict[str, Any] | None
    central: dict[str, Any] | None
    threshold: int = 0

    def in_words(self) -> str:
        """Describe the terms in one line."""
        if self.epsilon_per_round is None and self.central is None and not self.epsilon_spent:
            return f"no noise anywhere (epsilon is infinite); the hub sees {self._seen()}"
        examples = "examples: no bound (epsilon is infinite)"
        if self.epsilon_per_round is not None:
            spent = ""
            if self.epsilon_with_spent is not None and self.epsilon_spent:
                spent = f", {self.epsilon_with_spent:.2f} with {self.epsilon_spent:.2f} spent before"
            examples = (
                f"examples: epsilon {self.epsilon_per_round:.2f} a round, {self.epsilon_after_all:.2f} after all "
                f"{self.num_rounds}{spent} (delta {self.target_delta:g}), noise here"
            )
        if self.central is None:
            return f"{examples}; the hub promises no noise and sees {self._seen()}"
        return (
            f"{examples}; all you send: epsilon {float(self.central['epsilon']):g} (delta "
            f"{float(self.central['target_delta']):g}), promised; the hub sees {self._seen()}"
        )

    def details(self) -> str:
        """Describe where the hub adds its noise; empty if it adds none."""
        if self.central is None:
            return ""
        return f"the hub adds noise to the result of {quoted(self.central['aggregator'], 40)}"

    def _seen(self) -> str:
        return f"sums of {self.threshold} or more" if self.threshold else "your update"


def planned(recipe: TrainingRecipe, num_rows: int) -> Plan:
    """Plan a private round before training. Raises the errors of ``make_plan``.

    Args:
        recipe: Recipe of the round.
        num_rows: Number of all rows, including those with nothing to learn, since all rows are sampled alike.
    """
    from pathlib import Path

    from gym_fed.config.hub.round_training import round_training
    from gym_fed.training.private.plan import make_plan

    return make_plan(round_training(recipe, 1, Path("unused")), num_rows)


def make_terms(
    recipe: TrainingRecipe,
    promises: Promises,
    plan: Plan | None,
    book: PrivacyBook,
    data: str,
    num_rounds: int,
) -> PrivacyTerms:
    """Create the terms; ``plan`` is None if the recipe has no privacy."""
    if plan is None:
        spent, per_round, after_all, together, target = book.epsilon(data), None, None, None, None
    else:
        target = plan.target_delta
        rounds = plan.event(plan.steps * max(1, num_rounds))
        spent = book.epsilon(data, target_delta=target)
        per_round, after_all = plan.epsilon(), plan.epsilon(rounds.count)
        together = book.epsilon(data, rounds, target_delta=target)
    return PrivacyTerms(
        epsilon_per_round=per_round,
        epsilon_after_all=after_all,
        epsilon_spent=spent,
        epsilon_with_spent=together,
        target_delta=target,
        num_rounds=num_rounds,
        local=None if recipe.privacy is None else recipe.privacy.model_dump(mode="json"),
        central=promises.central,
        threshold=promises.threshold,
    )


def check_promises(policy: Policy, promises: Promises) -> None:
    """Check a hub's promises against the contributor's policy.

    Raises:
        GymError: ``POLICY_REFUSED`` with the policy's limit.
    """
    if policy.max_hub_epsilon is not None and promises.hub_epsilon > policy.max_hub_epsilon:
        promise = "no central privacy" if promises.central is None else f"epsilon {promises.hub_epsilon:g}"
        raise GymError(
            ErrorCode.POLICY_REFUSED,
            f"the server promises {promise}; max_hub_epsilon of this machine is {policy.max_hub_epsilon:g}",
            "raise or remove max_hub_epsilon in policy.yaml to allow it",
        )
    if promises.central is not None and promises.hub_delta > policy.max_target_delta:
        raise GymError(
            ErrorCode.POLICY_REFUSED,
            f"the server states its epsilon at delta {promises.hub_delta:g}, where any epsilon is small; "
            f"max_target_delta of this machine is {policy.max_target_delta:g}",
            "raise max_target_delta in policy.yaml to allow it",
        )
    if policy.require_secure_aggregation and not promises.secure_aggregation:
        raise GymError(
            ErrorCode.POLICY_REFUSED,
            "the server sees every update individually, but this machine's policy has require_secure_aggregation",
            "remove require_secure_aggregation from policy.yaml to allow it",
        )


def require_as_promised(policy: Policy, promised: Promises, now: Promises) -> None:
    """Reject a hub that now promises less privacy than before joining, or less than the policy requires.

    Raises:
        GymError: ``POLICY_REFUSED`` with the broken promise.
    """
    check_promises(policy, now)
    for name, before, later in (
        ("epsilon", promised.hub_epsilon, now.hub_epsilon),
        ("target_delta", promised.hub_delta, now.hub_delta),
    ):
        if later > before:
            raise _changed(
                f"the server now promises {name} {later:g} for all you send, but {before:g} was shown before joining"
            )
    if promised.secure_aggregation and not now.secure_aggregation:
        raise _changed(
            "the server now sees every update individually, but secure aggregation was shown before joining"
        )


def require_sums(promised: Promises, asked: SecureTask | None) -> None:
    """Reject a task that reveals more of an update than the sums promised before joining.

    Raises:
        GymError: ``POLICY_REFUSED``.
    """
    threshold = 0 if asked is None else asked.threshold
    if threshold < promised.threshold:
        gets = "the update itself" if asked is None else f"a sum of {counted(threshold, 'update')} or more"
        raise _changed(
            f"the task gives the hub {gets}, but a sum of {promised.threshold} or more was shown before joining"
        )


def require_as_announced(announced: TrainingRecipe | None, asked: TrainingRecipe) -> None:
    """Reject a task that protects examples less than the recipe that was announced before joining.

    Raises:
        GymError: ``POLICY_REFUSED`` with the weaker setting.
    """
    if announced is None or announced.privacy is None:
        return
    if asked.privacy is None:
        raise _changed("the task has no recipe.privacy, which was announced before joining")
    before, now = announced.privacy, asked.privacy
    for name, announced_value, task_value in (
        ("algorithm", announced.algorithm, asked.algorithm),
        ("max_length", announced.max_length, asked.max_length),
    ):
        if announced_value != task_value:
            raise _changed(
                f"the task's recipe.{name} is {task_value!r}, but {announced_value!r} was announced; it decides "
                "which rows are used"
            )
    for name, was, value, worse in (
        (
            "privacy.noise_multiplier",
            before.noise_multiplier,
            now.noise_multiplier,
            now.noise_multiplier < before.noise_multiplier,
        ),
        (
            "privacy.target_delta",
            before.target_delta,
            now.target_delta,
            now.target_delta > before.target_delta,
        ),
        ("max_steps", announced.max_steps, asked.max_steps, asked.max_steps > announced.max_steps),
        ("batch", _batch(announced), _batch(asked), _batch(asked) > _batch(announced)),
    ):
        if worse:
            raise _changed(
                f"the task's recipe.{name} is {value:g}, but {was:g} was announced: examples would be less protected"
            )


def _changed(change: str) -> GymError:
    return GymError(
        ErrorCode.POLICY_REFUSED,
        change,
        "the hub changed its terms after you joined; review them with gym-client join",
    )


def _batch(recipe: TrainingRecipe) -> int:
    return recipe.per_device_train_batch_size * recipe.gradient_accumulation_steps


def require_within_budget(policy: Policy, book: PrivacyBook, data: str, plan: Plan) -> None:
    """Reject a round if ``data`` would exceed the policy's privacy budget over all hubs.

    Raises:
        GymError: ``POLICY_REFUSED`` with the current spending and the spending after the round.
    """
    if policy.max_epsilon is None:
        return
    after = book.epsilon(data, plan.event(), target_delta=plan.target_delta)
    if after > policy.max_epsilon:
        spent = book.epsilon(data, target_delta=plan.target_delta)
        raise GymError(
            ErrorCode.POLICY_REFUSED,
            f"this data has spent epsilon {spent:.3f} and would have spent {after:.3f} after the round, over this "
            f"machine's max_epsilon of {policy.max_epsilon:g}",
            "raise max_epsilon in policy.yaml to allow it, or use other data",
        )


def charge_for(plan: Plan, steps: int, *, data: str, server: str, server_round: int, delta: str) -> Charge:
    """Create the charge for an update of ``steps`` private steps."""
    return Charge(
        data=data,
        server=server,
        server_round=server_round,
        delta=delta,
        noise_multiplier=plan.noise_multiplier,
        sampling_probability=plan.sampling_probability,
        steps=steps,
        target_delta=plan.target_delta,
        at_seconds=now(),
    )
