"""Which weights are trained, one method a file: file name = registry name = value of ``finetuning``."""
