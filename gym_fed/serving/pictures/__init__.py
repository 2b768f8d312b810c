"""Pictures in prompts: what arrives is decoded, a model's processor prepares it, and its vision tower reads it.

Features are computed once a picture and take the place of embeddings in the engine's steps.
"""
