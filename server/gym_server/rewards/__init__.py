"""What a round was worth to the network, and who is credited with it.

``free_riders`` finds what nobody worked for, before the merge; ``scores`` measures what the rest gave, after it;
``appraisal`` makes credits of that; ``reputations`` keeps scores and reputations, in the transaction of the round.
"""
