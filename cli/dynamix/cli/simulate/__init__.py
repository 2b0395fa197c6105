"""`dynamix simulate`: one job on a virtual cluster."""
