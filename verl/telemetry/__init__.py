"""Telemetry of a run: trackers, traces, progress, profiles, memory, and the record of its start."""
