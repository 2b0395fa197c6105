"""Exchange: how the gradients of all ranks become one sum, and which way of it is in effect on a step."""
