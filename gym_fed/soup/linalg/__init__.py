"""The arithmetic of rules: Gram matrices, medians, spectra, votes on packed bits; the same bits on every machine."""
