"""Several processes of one run: launch, communication, and the split of the model."""
