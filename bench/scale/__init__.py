"""How far one arbitrator reaches: decision latency, ingest, CPU and memory from 32 workers to 10,000.

A `plan` says what is run. `generator` plays trainers and collectors in a process of its own, `watch` reads what is
decided and samples the processes, `latency` makes figures of that, `measurement` puts them together in a `result`.
`__main__` measures one plan, `curve` a range of sizes for docs/scale.md, `shards` several arbitrators on one broker.
In: workers, jobs, rate, policy. Out: a `ScaleResult`, its targets, and docs/scale.json, .png and .md.
"""
