"""The `gym` command.

Neighbours: imports child_process, compat, config, console, data, delta, doctor, downloads, errors,
evaluation, export, files, identity, json_files, kinds, leaderboard, modeling, models, old_names,
personalization, planning, quantization, registry, serving, soup, tables, text, tracking, training, web,
webui; imported by none.
"""
