"""One forward pass for rows of different variants: caches, attention, and what each variant adds to a module.

Neighbours: imports none; imported by base, base_spec, engine, openai, pictures, setup, store.
"""
