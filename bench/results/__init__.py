"""The experiments behind docs/results.md: `python -m bench.results [--only NAME] [--scale reduced|full]`."""
