"""The words that people bring from other platforms: one table, each with our own word; `gym docs aliases` prints it.

Nothing below knows these words. ``gym_fed.core.aliases`` reads ``words`` when a name is about to be refused.
"""
