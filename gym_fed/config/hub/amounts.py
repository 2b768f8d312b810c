"""The limit of credits: sums stay whole numbers of 53 bits, which every JSON reader and database can count."""

from __future__ import annotations

MAX_AMOUNT = 10**9
"""Of one round, or of one report of usage."""

MAX_ROYALTIES = 2**52
"""Limit of all reports together; added to the credits of four million rounds, a sum still has 53 bits."""
