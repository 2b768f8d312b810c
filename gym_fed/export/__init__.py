"""Models as other programs read them: written, read back in a fresh process, and compared with their source."""
