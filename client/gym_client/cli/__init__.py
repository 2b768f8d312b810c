"""`gym-client`: commands, questions and displays. Imports every other folder."""
