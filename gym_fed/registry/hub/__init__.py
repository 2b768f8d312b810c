"""Models for the Hugging Face Hub: a folder with card and `.eval_results`, and its upload."""
