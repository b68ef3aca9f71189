"""Hands a run's settings, metrics and result to W&B or MLflow (`--log`), by their own libraries."""
