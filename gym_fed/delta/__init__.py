"""Delta = tuned - base: file format, diff, apply, digest."""
