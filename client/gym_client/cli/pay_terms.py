"""The terms of pay that a hub announces in its status."""

from __future__ import annotations

from pydantic import ValidationError

from gym_client.hub import from_hub
from gym_fed.config.hub.pay import PayTerms
from gym_fed.config.schema.problems import first_problem
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.wire.v1 import hub_pb2 as pb


def announced_pay(status: pb.StatusReply) -> PayTerms | None:
    """What the hub says its rounds pay; None for a hub that says nothing.

    Raises:
        GymError: ``POLICY_REFUSED`` for terms that cannot be read.
    """
    said = from_hub.document(status.recipe_json or "{}", "a recipe", ErrorCode.POLICY_REFUSED).get("pay")
    if said is None:
        return None
    try:
        return PayTerms.model_validate(said)
    except ValidationError as error:
        raise GymError(
            ErrorCode.POLICY_REFUSED,
            f"the server announces terms of pay that cannot be read: {first_problem(error)}",
            "update gym-fed",
        ) from error
