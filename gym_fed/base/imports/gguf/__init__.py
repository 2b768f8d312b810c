"""Read GGUF files: header, config, tensors and tokenizer."""
