"""What is known of a job while it runs: for `dynamix top`, the page, and any other display.

In: the messages of one job and the services' heartbeats, from the bus (`feed`) or from any caller. Out: a `Board` with
the newest window, ranks, nodes, decision and rewards, with its `Timeline` (what it did window by window);
`Heartbeats`; `snapshot`, all of it as a JSON document.

Nothing here imports rich or matplotlib, or prints: the terminal (`commands/top/view`) and the page (`cli/dashboard`)
use it. `board`, `timeline` and `heartbeats` do no I/O and read no clock; only `feed` (one job), `fleet` (all jobs)
and `past` (what is stored) know the bus. Change here what is known of a job.
"""
