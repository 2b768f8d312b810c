"""The optimisers, one a file or a name of transformers': value of ``optimizer``."""
