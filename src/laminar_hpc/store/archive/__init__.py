"""Responses after their training: one Parquet file for each trainer step, which pandas and `datasets` read as
it is; imports no torch."""
