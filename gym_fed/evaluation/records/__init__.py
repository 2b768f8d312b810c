"""Records of evaluations: one JSON document a run and every sample beside it, keyed by what the results depend on.

Neighbours: imports evaluator, groups, harness, own_rows, results, scoring, suites; imported by evaluator,
running.
"""
