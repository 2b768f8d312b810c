"""Updates that are suspiciously alike or large.

Neighbours: imports stacks; imported by delta_soup.
"""
