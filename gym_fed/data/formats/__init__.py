"""Formats of datasets, one file each: how a raw row becomes a row of ``gym_fed.data.rows``, and back.

Neighbours: imports csv_rows, labels, rows; imported by catalogue, column_question, columns, dataset_info,
reading, writing.
"""
