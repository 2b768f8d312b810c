"""Training algorithms, one per file: file name = registry name = YAML value. Adding a file registers it.

A folder contains a family. Files that start with ``_`` are shared code; every other file is an algorithm.

- ``sft``, ``pretrain``: next-token loss.
- ``preference/``: ``dpo``, ``tdpo``, ``kto``, ``orpo``, ``simpo``, and ``reward_model``, which learns a score from
  pairs.
- ``rewards/``: ``grpo``, ``gspo``, ``rloo``, which compare several answers to a prompt, and ``ppo``, which has a
  critic.
- ``distillation/``: ``distillation``, ``sequence_distillation``.
- ``unlearning/``: ``gradient_difference``, ``npo``.

Installed packages add algorithms through the entry point group ``gym_fed.algorithms``.
"""
