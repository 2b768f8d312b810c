"""One module per thing that `gym doctor` looks at.

Neighbours: imports check; imported by none.
"""
