"""What `dynamix top` draws: the board as lines of text for a terminal of any size, redrawn as news comes."""
