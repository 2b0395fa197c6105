"""What is known of a job while it runs: for `dynamix top`, its JSON, and any other display.

In: the messages of one job and the services' heartbeats, from the bus (`feed`) or from any caller. Out: a `Board` with
the newest window, ranks, nodes, decision and rewards; `Heartbeats`; `snapshot`, all of it as a JSON document.

Nothing here imports rich or matplotlib, or prints: a web page can use it. `board` and `heartbeats` do no I/O and
read no clock; only `feed` knows the bus. Change here what is known of a job; change `commands/top/view` for what it
looks like.
"""
