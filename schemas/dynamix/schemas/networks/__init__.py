"""Networks of learned policies: what the arbitrator and the agents of `stigmergy` must mean alike. No torch.

`forward` evaluates a network in numpy, `files` reads its tensors and metadata and checks them, `sight` is what an agent
shows to its network. Which actions a network chooses among is its owner's: the arbitrator's (`arbitrator/learned`), or
an agent's (`collector/agent_network`).
"""
