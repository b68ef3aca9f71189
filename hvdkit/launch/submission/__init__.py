"""A training run as a job for a scheduler: files that a person can read, and the command that hands them over."""
