"""The figures of a run, on disk and in the services that the user names: one `Experiment`, one tracker a file."""
