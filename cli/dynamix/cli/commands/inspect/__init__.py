"""Show what a capture holds: windows, decisions, rewards, gaps."""
