"""Shared infrastructure: errors, files, processes, text, the terminal and the registries."""
