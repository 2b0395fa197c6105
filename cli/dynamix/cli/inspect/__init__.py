"""`dynamix inspect`: what a capture holds, as tables, JSON and a picture."""
