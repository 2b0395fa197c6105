"""Extensions of our own: what the core does not need, attached by entry points as other people's packages are."""
