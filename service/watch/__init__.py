"""Searches, and training itself, watched as they go on."""
