"""Imported by the fork server of trials alone: it ends with its worker, and its forks end with it."""

from trainables.leftovers import end_with_parent

end_with_parent()
