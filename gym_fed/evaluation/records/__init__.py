"""Records of evaluations: one JSON document a run and every sample beside it, keyed by what the results depend on."""
