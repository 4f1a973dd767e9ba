"""What a run writes down and shows: step log, trackers, progress and reports."""
