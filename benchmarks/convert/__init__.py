"""Searches and sheets made into data."""
