"""Distillation: a student learns a teacher's distributions or its answers. This family may import ``sft``."""
