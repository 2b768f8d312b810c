"""Credits for contributors: the value of each update to the network, measured per round.

``free_riders`` finds worthless or copied updates before the merge. ``scores`` measures the value of the others after
the merge. ``appraisal`` converts scores to credits. ``reputations`` stores scores and reputations in the round's
transaction.
"""
