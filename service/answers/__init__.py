"""What a record says: which layouts are best, how sure that is, and why others are not."""
