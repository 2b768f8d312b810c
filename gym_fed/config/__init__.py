"""Pydantic schemas of every YAML file, with errors that name file, line and column. No ML imports here.

Neighbours: imports data, errors, identity, json_files, kinds, models, other_words, renamed, text; imported by
cli, compat, data, delta, doctor, downloads, evaluation, export, identity, leaderboard, ledger,
personalization, planning, privacy, quantization, quickstart, registry, serving, soup, tracking, training,
web, webui.
"""
