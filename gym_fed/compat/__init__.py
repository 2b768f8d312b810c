"""The words that people bring from other platforms: one table, each with our own word; docs/names.md prints it.

Nothing below knows these words. ``gym_fed.other_words`` reads ``words`` when a name is about to be refused.

Neighbours: imports config, data, errors, json_files, kinds, other_words, registry, training; imported by cli.
"""
