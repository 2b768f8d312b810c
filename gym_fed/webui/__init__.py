"""`gym webui`: the workbench of one machine in a browser. Runs are processes of their own, which outlive it.

Neighbours: imports errors, files, json_files, web; imported by cli.
"""
