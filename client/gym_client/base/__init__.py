"""The base model of a federation, where this machine lacks it: offered, fetched, checked and kept."""
