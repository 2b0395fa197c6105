"""The reward service: metric windows in, rewards out, every term kept apart.

`formula` (pure) computes, weighs and adds the terms, `service` consumes and publishes. A new formula is a case in
`formula._terms`; its weights and their defaults are in `Weights`, which are also the service's settings.
"""
