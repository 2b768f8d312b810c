"""Fine-tune models that read images, sound or video."""
