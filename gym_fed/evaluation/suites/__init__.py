"""Suites of evaluation tasks: their registry, rows and downloads.

- ``tasks``: tasks by name: ``tasks_of``; ``eval_task``: one of them, with definition, rows and digest.
- ``listing``, ``members``: the registry, ``assets/suites/registry.yaml``; ``definitions``: the harness's YAML files.
- ``own_file``: task files of one's own; ``rendering``: their templates, in a sandbox.
- ``data``, ``layouts``, ``row_files``, ``store``: rows of the package, of a folder, and what was fetched.
- ``fetch``: the only module that uses a network; ``grading``: metrics of ours; ``needs``: what a metric lacks.
"""
