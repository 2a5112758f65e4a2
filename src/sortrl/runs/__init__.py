"""Runs: the stages from a teacher to a report, strung together; one directory, one lock, one identity each."""
