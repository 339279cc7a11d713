"""Other people's logs as trajectories: one file a format, masks for secrets, and a report on what a log covers."""
