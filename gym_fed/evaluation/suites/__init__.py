"""Suites of evaluation tasks: their registry, rows and downloads.

- ``tasks``: tasks by name (``tasks_of``); ``eval_task``: a task with definition, rows and digest.
- ``definitions``: the harness's YAML files; ``own_file``: custom task files; ``rendering``: templates, in a sandbox.
- ``store``: the registry (``assets/suites/registry.yaml``) and fetched rows; ``row_files``: files of rows.
- ``grading``: built-in metrics; ``fetch``: downloads, the only module that uses a network.
"""
