"""Pictures, sounds and videos in prompts: decoded, prepared by the model's processor, and read by its own towers.

Features are computed once per medium and replace embeddings in the engine's steps.
"""
