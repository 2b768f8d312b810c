"""Whether this process is the bounded one: there, templates are rendered without another process."""

is_bounded = False
"""Set by ``gym_fed.bounded.worker``."""
