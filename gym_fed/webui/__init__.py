"""`gym webui`: the workbench of one machine in a browser. Runs are processes of their own, which outlive it.

Neighbours: imports base_files, child_process, config, data, downloads, errors, evaluation, export, files,
identity, json_files, kinds, leaderboard, modeling, models, personalization, portable, serving, text,
tracking, training, web; imported by cli.
"""
