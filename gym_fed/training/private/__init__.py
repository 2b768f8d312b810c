"""DP-SGD (Abadi et al. 2016) for ``sft`` and ``pretrain``: Opacus' gradients of single examples in a loop of our own.

``plan`` says what a run costs, ``checks`` what is refused, ``gradients`` clips, ``noise`` hides, ``sampling`` draws the
batches, ``loop`` puts them together.

Neighbours: imports active_features, run; imported by algorithms, run.
"""
