"""Fine-tuning of models that read images, sound or video."""
