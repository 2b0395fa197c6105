"""Train a real job on this machine three times: left alone, divided by speed, and steered."""
