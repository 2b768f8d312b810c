"""Evaluation records: a JSON document and a file of samples per run, keyed by everything that the results depend on."""
