"""The hub's side of secure aggregation: the stages of a round, and the sum that they end in."""
