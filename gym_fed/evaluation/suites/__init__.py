"""Suites of evaluation tasks: what there is, where its rows are, and how they are fetched.

- ``tasks``: tasks by name, with definition, rows and digest: ``tasks_of``.
- ``listing``: the registry, ``assets/suites/registry.yaml``; ``definitions``: the harness's YAML files.
- ``own_file``: task files of one's own; ``rendering``: their templates, in a sandbox.
- ``data``, ``layouts``, ``row_files``, ``store``: rows of the package, of a folder, and what was fetched.
- ``fetch``: the only module that uses a network; ``grading``: metrics of ours; ``needs``: what a metric lacks.

Neighbours: imports config, downloads, errors, evaluation, files, text; imported by cli, evaluation.
"""
