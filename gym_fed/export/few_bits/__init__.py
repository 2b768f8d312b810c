"""AWQ and GPTQ: weights of 4 bits in groups, found by auto-round in a process of its own, with texts that calibrate it.

Neighbours: imports process; imported by formats.
"""
