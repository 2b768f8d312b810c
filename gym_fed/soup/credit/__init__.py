"""What a round is worth to whom: shares of a soup, credits, reputation.

Neighbours: imports none; imported by contribution, delta_soup.
"""
