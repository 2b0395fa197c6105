"""`dynamix demo`: one real training job, static and then steered, with every service in its own process."""
