"""Time to a held-out accuracy on real clocks: `python -m bench.cluster --target 0.85`, for root.

Real gloo ranks, one on each host, train until a held-out accuracy is reached; what is compared is the training time,
which stands still while the accuracy is looked up. `cases` says what is slow, `arms` how the job is steered, `campaign`
which runs that makes: in turn, with paired seeds and a search for the baselines' best settings. `ranks` is the job,
forked for each run, with its `clock`; `runner` starts, slows down, watches and captures it, by the `messages` between
them; `outcomes` keeps each run in a file of its own. `prediction` lets virtual clusters, calibrated on a captured run
of another policy, predict the ratios; `verdict` makes the table, `command` the command line.
"""
