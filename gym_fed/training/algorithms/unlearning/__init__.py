"""Unlearning: gradient difference and NPO. It may import ``sft``, which encodes the rows."""
