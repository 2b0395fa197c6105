"""Replay of the arbitrator: a capture in; decisions and events out, compared with the recorded ones.

- `start` finds where a capture can be entered: at the first state, or after an action whose inputs it has.
- `bus` has the streams as they stood while the recorded arbitrator read them, `action_store` its subject in ACTIONS.
- `events` compares failure signatures, `policy_files` finds learned policies, `what_if` asks another policy.

What of the bus is needed here follows from `dynamix.arbitrator.service.ArbitratorBus`.
"""
