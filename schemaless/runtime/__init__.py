"""What every process of ours runs on: start and stop, the event loop's lateness, batches, pace, events, extras."""
