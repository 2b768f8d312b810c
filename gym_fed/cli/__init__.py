"""The `gym` command.

Neighbours: imports addresses, child_process, compat, config, console, data, delta, doctor, downloads, entry,
errors, evaluation, export, files, identity, json_files, kinds, leaderboard, modeling, models, old_names,
options, personalization, planning, quantization, registry, serving, soup, tables, text, tracking, training,
waiting, web, webui; imported by none.
"""
