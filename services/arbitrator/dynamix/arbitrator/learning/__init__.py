"""Learning: PPO and the service that learns from live jobs; the only room of the arbitrator that imports torch.

In: recorded states, actions, receipts and rewards. Out: policy files. `rollout` turns a generation into a trajectory,
`gae` and `ppo` learn from it, `network` and `agent` hold what is learned. The service (`python -m
dynamix.arbitrator.learning`) collects finished generations (`generations`, `collecting`, `rewards`) and updates in a
process of its own (`updating`): decisions never wait for it.
"""
