"""Hands a run's settings, metrics and result to W&B or MLflow (`--log`), from a process beside the command.

No rank and no runtime needs their libraries: the command already follows what rank 0 writes, and passes it on.
"""
