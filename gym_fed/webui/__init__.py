"""`gym webui`: the workbench of one machine in a browser. Runs are processes of their own, which outlive it.

Neighbours: imports config, data, downloads, errors, files, identity, json_files, kinds, models, serving,
tracking, training, web; imported by cli.
"""
