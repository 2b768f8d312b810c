"""Models as other programs read them: written, read back in a fresh process, and compared with their source.

Neighbours: imports base_files, bounded, child_process, config, data, delta, doctor, errors, evaluation,
file_lock, files, imports, json_files, kinds, modeling, models, other_words, portable, registry, serving,
text, training, version; imported by cli, registry, training, webui.
"""
