"""What happened to devices between two instants: `device` of one of them, `trial` of all that a trial has."""
