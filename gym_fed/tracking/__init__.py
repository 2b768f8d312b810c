"""The figures of a run, kept on disk and told to whom the user names: one `Experiment`, one tracker a file.

Neighbours: imports config, errors, files, kinds; imported by cli, training.
"""
