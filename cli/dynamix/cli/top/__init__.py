"""`dynamix top`: a live view of one job."""
