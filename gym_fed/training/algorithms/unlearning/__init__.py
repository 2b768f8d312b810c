"""Unlearning: gradient difference and NPO. This family may import ``sft``, which encodes the rows."""
