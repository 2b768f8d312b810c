"""Distillation: a student learns a teacher's distributions, or the answers that it writes. It may import ``sft``."""
