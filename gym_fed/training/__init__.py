"""The standalone trainer and its algorithms, one file each, in one registry.

Neighbours: imports bounded, child_process, config, console, data, delta, doctor, downloads, errors,
evaluation, export, file_lock, files, json_files, kinds, lazy, library_env, modeling, models, other_words,
planning, portable, privacy, renamed, soup, text, tracking, waiting; imported by cli, compat, evaluation,
export, personalization, planning, quickstart, webui.
"""

from gym_fed.library_env import settle

settle()  # before a module of this room imports a training library
