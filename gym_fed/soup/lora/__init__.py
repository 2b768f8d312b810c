"""Soups of LoRA factors that stay factors."""
