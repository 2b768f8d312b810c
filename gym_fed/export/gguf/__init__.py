"""GGUF files: llama.cpp's own converter, in a process of its own, on a model folder."""
