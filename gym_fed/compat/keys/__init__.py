"""Keys and values of configs that have another name elsewhere, a file for each schema.

Neighbours: imports datasets, row; imported by flags, words.
"""
