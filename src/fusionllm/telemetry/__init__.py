"""What a run tells about itself: events, where they go, the loss curve, the summary, log lines.

No torch, no protocol, no decisions; an event carries its own times. On the path, aside: run -> **event** ->
files.
"""
