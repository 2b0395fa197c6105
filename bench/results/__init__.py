"""The experiments behind docs/results.md: `python -m bench.results [--only NAME] [--scale reduced|full]`.

`laboratory` runs episodes and learns policies, each once; `baselines`, `learned` and `rewards` are the experiments;
`result` is what an experiment found, its rows, JSON and table. `heldout` and `exchange` are what it shows of the
two held-out comparisons, by `verdict_table`.
In: scenarios and policies of dynamix.lab. Out: docs/results/ and docs/results.md.
"""
