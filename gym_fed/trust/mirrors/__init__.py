"""Mirrors of a hub: the signed list of mirrors, and the folder of a mirror."""
