"""The figures of a run, kept on disk and told to whom the user names: one `Experiment`, one tracker a file."""
