"""Aliases for names used by other projects: commands, flags, config keys and Python names; see `gym docs aliases`.

No other package imports this one. ``gym_fed.core.aliases`` loads ``words`` before an unknown name is refused.
"""
