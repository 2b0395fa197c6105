"""Learn a policy by PPO on virtual clusters."""
