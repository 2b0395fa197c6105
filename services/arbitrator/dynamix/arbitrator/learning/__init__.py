"""Learning: PPO and the service that learns from live jobs; the only room of the arbitrator that imports torch.

In: recorded states, actions, receipts and rewards. Out: policy files. `rollout` turns a generation into a trajectory,
`ppo` learns from it. `service` (`python -m dynamix.arbitrator.learning`) collects finished generations and updates in a
process of its own: decisions never wait for it.
"""
