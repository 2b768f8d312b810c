"""GGUF files, written by llama.cpp's own converter in a separate process."""
