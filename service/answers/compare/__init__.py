"""Searches held against each other: what each is best at, layouts that both ran, and whether to scale up or out."""
