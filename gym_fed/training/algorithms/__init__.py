"""The training algorithms: file name = registry name = YAML value. Adding a file registers it.

A folder holds a family: files that begin with ``_`` are shared code, every other file is an algorithm.

- ``sft``, ``pretrain``: next-token loss.
- ``preference/``: ``dpo``, ``tdpo``, ``kto``, ``orpo``, ``simpo``, and ``reward_model``, a score learned from pairs.
- ``rewards/``: ``grpo``, ``gspo``, ``rloo``, which compare the answers to one prompt, and ``ppo``, which has a critic.
- ``distillation/``: ``distillation``, ``sequence_distillation``.
- ``unlearning/``: ``gradient_difference``, ``npo``.

Installed packages add algorithms through the entry point group ``gym_fed.algorithms``.
"""
