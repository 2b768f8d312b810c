"""DP-SGD (Abadi et al. 2016) for ``sft`` and ``pretrain``: Opacus' per-example gradients in a separate training loop.

``plan`` computes the privacy cost of a run, ``gradients`` clips and adds noise, and ``loop`` draws batches and trains.
``run/checks.py`` refuses configs that the privacy accounting does not cover.
"""
