"""One forward pass for rows of different variants: caches, attention, and what each variant adds to a module."""
