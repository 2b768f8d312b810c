"""The model card: written from the run's record, evaluations and licences; what they do not say is not stated."""
