"""Adapter of lm-evaluation-harness: its tasks, prompts and metrics, with the log-likelihoods and answers of a
``Scorer``.

Only this package imports ``lm_eval``. The harness's models, caches (which use pickle) and downloads are not used: rows
are already on this machine.
"""
