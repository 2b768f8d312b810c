"""The content filter of `gym api`: rules by category, text held back until no rule can match it, a classifier."""
