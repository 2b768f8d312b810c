"""Keys, signatures, canonical bytes.

Neighbours: imports config, errors, files, text, wire; imported by base_files, cli, config, delta, doctor,
evaluation, leaderboard, ledger, modeling, personalization, privacy, registry, serving, soup, webui.
"""
