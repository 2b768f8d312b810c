"""The safety probe: refusal margin, attacks, over-refusal, and what is left after a harmful fine-tune.

Neighbours: imports compare, loss, results, scoring; imported by none.
"""
