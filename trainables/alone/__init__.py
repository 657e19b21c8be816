"""What a program of the user's finds first on `PYTHONPATH` where one of its ranks runs alone: nothing to import."""
