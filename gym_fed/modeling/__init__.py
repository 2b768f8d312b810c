"""Changes to the code of a loaded model that its saved folder carries: longer rotary positions, routed blocks.

Neighbours: imports errors, files, json_files, models, portable, text; imported by cli, evaluation, export,
models, personalization, quantization, registry, serving, training, webui.
"""
