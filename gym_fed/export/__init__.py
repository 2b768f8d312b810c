"""Export of models for other programs: written, read back in a fresh process, and compared with the source."""
