"""The model of a run: loaded, made from nothing, held in few bits, saved."""
