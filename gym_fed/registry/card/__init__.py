"""The model card, written from the run's record, evaluations and licences."""
