"""Programs of the user's: started, watched and listened to."""
