"""Record the steps of a training run, and replay some of them to verify the record."""
