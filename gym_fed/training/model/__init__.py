"""The model of a run: loading, random initialisation, quantisation and saving."""
