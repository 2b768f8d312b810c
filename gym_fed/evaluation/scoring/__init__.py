"""Log-likelihoods and answers for evaluation, of one model or of many variants of one base in one pass.

Neighbours: imports none; imported by evaluator, harness, probe, records, running.
"""
