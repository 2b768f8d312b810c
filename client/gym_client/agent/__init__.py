"""The contributor's agent: fetches tasks from a hub, trains, encodes and submits updates."""
