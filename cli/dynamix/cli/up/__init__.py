"""`dynamix up`: broker and services of one machine, kept running until interrupted."""
