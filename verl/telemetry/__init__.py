"""What a run reports: trackers, traces, progress, profiles, memory, and the record of its start."""
