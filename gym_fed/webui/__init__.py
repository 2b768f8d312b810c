"""`gym webui`: the workbench of one machine in a browser. Runs are processes of their own, which outlive it.

Neighbours: imports config, data, downloads, errors, files, json_files, kinds, models, tracking, training,
web; imported by cli.
"""
