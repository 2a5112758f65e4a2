"""What every layer stands on: errors, files, records, checkpoints, statistics. Imports nothing of sortrl above it."""
