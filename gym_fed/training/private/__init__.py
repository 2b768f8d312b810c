"""DP-SGD (Abadi et al. 2016) for ``sft`` and ``pretrain``: Opacus' gradients of single examples in a loop of our own.

``plan`` computes the privacy cost of a run, ``gradients`` clips and noises, ``loop`` draws the batches and trains.
``run/checks.py`` refuses configs that are not accounted for.
"""
