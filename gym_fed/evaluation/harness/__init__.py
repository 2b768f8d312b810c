"""lm-evaluation-harness over a ``Scorer``: its tasks, prompts, tokens and metrics, our log-likelihoods and answers.

The one room that imports ``lm_eval``. The harness's own models, caches (which pickle) and downloads are not used: rows
are on this machine before anything here runs.
"""
