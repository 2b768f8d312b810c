"""`gym webui`: the workbench of one machine in a browser. Runs are processes of their own, which outlive it."""
