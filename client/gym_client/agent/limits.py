"""Update the hours and the behaviour on battery in ``policy.yaml``, keeping comments and other keys."""

from __future__ import annotations

from pydantic import ValidationError

from gym_client.agent.policy import Policy
from gym_client.identity.home import Home
from gym_fed.config.schema.base import first_problem
from gym_fed.config.yaml.edit import with_value
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import write_atomically


def set_limits(home: Home, hours: list[str], on_battery: str) -> Policy:
    """Write the limits and return the new policy. A running agent rereads the file within seconds.

    Args:
        home: The home with ``policy.yaml``, which is created if it is missing.
        hours: Spans such as ``22:00-07:00``; empty for any time.
        on_battery: ``train``, ``pause`` or ``refuse``.

    Raises:
        GymError: ``USAGE`` for an invalid value; ``CONFIG_INVALID`` if the file cannot be read.
    """
    before = Policy.load(home.policy_path)
    try:
        Policy.model_validate({"hours": hours, "on_battery": on_battery})
    except ValidationError as error:
        raise GymError(ErrorCode.USAGE, first_problem(error)) from error
    text = home.policy_path.read_text(encoding="utf-8") if home.policy_path.exists() else ""
    if hours != before.hours:
        text = with_value(text, ("hours",), hours or None)
    if on_battery != before.on_battery:
        text = with_value(text, ("on_battery",), on_battery)
    if text:
        write_atomically(home.policy_path, text.encode())
    return Policy.load(home.policy_path)
