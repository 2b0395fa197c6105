"""Models of policies: `step_time` predicts the time of a step, `exchange` the cost of each way to exchange gradients.

`observation` names the columns, `links` are the rates of the ranks' links, `earlier_runs` and `exploration` what runs
of a job family teach each other. States are msgspec structs that `policies.carry` packs. No policy has to use them.
"""
