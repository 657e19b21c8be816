"""What to run next: the study and its sampler, what it begins with, and the agenda of a search."""
