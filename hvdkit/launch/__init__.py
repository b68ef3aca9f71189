"""From one command to N ranks, and their end."""
