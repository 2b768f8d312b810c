"""Keys, signatures, canonical bytes.

Neighbours: imports config, errors, files, wire; imported by cli, config, delta, ledger, personalization,
privacy, serving, soup.
"""
