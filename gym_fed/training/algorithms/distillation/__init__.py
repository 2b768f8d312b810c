"""Distillation: a student learns a teacher's distributions or answers. This family may import ``sft``."""
