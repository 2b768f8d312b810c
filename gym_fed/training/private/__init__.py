"""DP-SGD (Abadi et al. 2016) for ``sft`` and ``pretrain``: Opacus' gradients of single examples in a loop of our own.

``plan`` computes the privacy cost of a run, ``checks`` refuses configs, ``gradients`` clips, ``noise`` adds noise,
``sampling`` draws the batches, ``loop`` combines them.
"""
