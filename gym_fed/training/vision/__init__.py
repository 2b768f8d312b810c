"""Fine-tuning of models that read images."""
