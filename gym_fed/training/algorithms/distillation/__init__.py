"""Distillation: a student learns a teacher's distributions, or its generated answers. This family may import sft."""
