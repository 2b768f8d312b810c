"""Pictures, audio and videos in prompts: decoding, the model's processor, and its encoder towers.

Features are computed once per medium and replace embeddings in the engine's steps.
"""
