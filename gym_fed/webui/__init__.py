"""`gym webui`: the workbench of one machine in a browser. Runs are processes of their own, which outlive it.

<<<<<<< HEAD
Neighbours: imports config, data, errors, files, json_files, kinds, models, tracking, training, web; imported
by cli.
=======
Neighbours: imports config, data, downloads, errors, files, identity, json_files, serving, tracking, training,
web; imported by cli.
>>>>>>> cd541165 (Name the neighbours of the workbench's folders)

Neighbours: imports config, data, downloads, errors, files, identity, json_files, kinds, models, serving,
tracking, training, web; imported by cli.
"""
