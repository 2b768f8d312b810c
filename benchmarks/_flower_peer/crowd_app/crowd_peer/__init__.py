"""A Flower app whose nodes return updates of a given size."""
