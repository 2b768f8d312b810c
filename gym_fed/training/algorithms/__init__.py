"""The training algorithms: file name = registry name = YAML value. Dropping a file in registers it.

A folder holds a family: each file that does not begin with ``_`` is an algorithm, the others are what they share.

- ``sft``, ``pretrain``, ``reward_model``: next-token loss, and a score learned from pairs.
- ``preference/``: ``dpo``, ``tdpo``, ``kto``, ``orpo``, ``simpo``.
- ``grpo/``: ``grpo``, ``gspo``, ``rloo``, which compare the answers to one prompt.
- ``ppo/``: ``ppo``, whose critic estimates the value of each token.
- ``distillation/``: ``distillation``, ``sequence_distillation``.
- ``unlearning/``: ``gradient_difference``, ``npo``.

Installed packages add theirs by the entry point group ``gym_fed.algorithms``.
"""
