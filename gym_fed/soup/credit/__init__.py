"""What a round is worth to whom: shares of a soup, credits, reputation."""
