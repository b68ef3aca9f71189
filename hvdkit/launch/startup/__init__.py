"""The folder that ranks of a program have first on their PYTHONPATH."""
