"""A Flower app that moves one array and times it."""
