"""The training algorithms: file name = registry name = YAML value. Dropping a file in registers it.

A folder holds a family: each file that does not begin with ``_`` is an algorithm, the others are what they share.

- ``sft``, ``pretrain``: next-token loss.
- ``preference/``: ``dpo``, ``tdpo``, ``kto``, ``orpo``, ``simpo``, and ``reward_model``, a score learned from pairs.
- ``rewards/``: ``grpo``, ``gspo``, ``rloo``, which compare the answers to one prompt, and ``ppo``, which has a critic.
- ``distillation/``: ``distillation``, ``sequence_distillation``.
- ``unlearning/``: ``gradient_difference``, ``npo``.

Installed packages add theirs by the entry point group ``gym_fed.algorithms``.
"""
