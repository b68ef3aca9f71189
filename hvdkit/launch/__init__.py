"""From one command to N ranks, and how they end."""
