"""Recurring jobs: runs of one family on virtual clusters, each beginning with what those before it taught."""
