"""Evaluation records: a JSON document and a file of samples per run, keyed by what the results depend on."""
