"""Adapter of lm-evaluation-harness: its tasks, prompts and metrics, with the log-likelihoods and answers of a
``Scorer``.

The one room that imports ``lm_eval``. The harness's own models, caches (which pickle) and downloads are not used: rows
are on this machine before anything here runs.
"""
