"""Pictures in prompts: they are decoded, prepared by the model's processor, and read by its vision tower.

Features are computed once per picture and replace embeddings in the engine's steps.
"""
