"""Log-likelihoods and answers for evaluation, of one model or of many variants of one base in one pass.

Neighbours: imports own_set; imported by evaluator, harness, own_evaluation, probe, records, running.
"""
