"""Changes to the code of a loaded model that its saved folder carries: longer rotary positions, routed blocks.

Neighbours: imports bounded, errors, files, identity, json_files, models, portable, system_errors, text;
imported by cli, delta, evaluation, export, imports, models, personalization, quantization, registry, serving,
soup, training, webui.
"""
