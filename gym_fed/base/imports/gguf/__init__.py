"""GGUF files as model folders: header, config, tensors and tokenizer, one page each."""
