"""What policies predict: `step_time` how long a step takes, `exchange` what each way of exchanging gradients costs.

`observation` names the columns, `links` are the rates of the ranks' links, `earlier_runs` and `exploration` what runs
of a job family teach each other. States are msgspec structs that `policies.carry` packs. No policy has to use them.
"""
