"""The rows of a run as batches: sources, packing, lengths, batch sizes, templates."""
