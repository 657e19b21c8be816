"""One trial: what a gang is asked to run, how long, and what came of it."""
