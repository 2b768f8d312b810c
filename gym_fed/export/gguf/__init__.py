"""GGUF files: llama.cpp's own converter, in a process of its own, on a model folder.

Neighbours: imports card, nearest, process, source, training_marks; imported by formats, readers.
"""
