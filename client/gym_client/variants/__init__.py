"""Personal variants at a hub: push, pull, list, remove."""
