"""A board of results: a file of signed, chained lines; a line counts as reproduced once another key re-ran samples.

Neighbours: imports config, errors, evaluation, file_lock, files, identity, ledger, text, version; imported by
cli, evaluation, webui.
"""
