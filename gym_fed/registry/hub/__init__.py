"""Models for the Hugging Face Hub: a folder with card and `.eval_results`, and its upload.

Neighbours: imports card, contents, fetching, manifest, models, preparing, rebuild, signers; imported by none.
"""
