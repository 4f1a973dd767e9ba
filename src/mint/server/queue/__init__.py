"""The queue in front of the engine: requests as data, scheduling, fairness, estimates and futures."""
