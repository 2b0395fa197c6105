"""What a capture holds, folded into one object per window: for `dynamix inspect`, its JSON, and any other display.

In: a capture file (`dynamix.recording.capture`). Out: an `Inspection` with its windows, decisions, rewards, gaps, the
check of the chain of actions; `document`, the same as a JSON document.

Nothing here imports rich or matplotlib, or prints. Only `inspect` reads a file; the rest is pure.
"""
