"""Pictures and figures of timelines."""
