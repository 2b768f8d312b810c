"""The arithmetic of rules: Gram matrices, medians, spectra, votes on packed bits; the same bits on every machine.

Neighbours: imports none; imported by aggregator, aggregators, lora, merging, methods, pipeline,
pre_aggregator, pre_aggregators, private, rule, stacks.
"""
