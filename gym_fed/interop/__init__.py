"""Aliases for names used by other projects: commands, flags, config keys and Python names; see `gym docs aliases`.

Nothing below knows these words. ``gym_fed.core.aliases`` reads ``words`` when a name is about to be refused.
"""
