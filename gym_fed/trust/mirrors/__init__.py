"""Mirrors of a hub: the list that the hub signs, and the folder of a mirror."""
