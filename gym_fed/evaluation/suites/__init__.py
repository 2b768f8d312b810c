"""Suites of evaluation tasks: their registry, rows and downloads.

- ``tasks``: tasks by name (``tasks_of``); ``eval_task``: a task with definition, rows and digest.
- ``listing``: the registry, ``assets/suites/registry.yaml``; ``definitions``: the harness's YAML files.
- ``own_file``: custom task files; ``rendering``: their templates, in a sandbox.
- ``store``, ``layouts``, ``row_files``: packaged, given and fetched rows; ``grading``: metrics of gym-fed.
- ``fetch``: the only module that uses a network.
"""
