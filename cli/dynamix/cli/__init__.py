"""The `dynamix` command."""
