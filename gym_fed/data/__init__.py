"""Datasets: formats, the generated text tasks, and what a trainer sees."""
