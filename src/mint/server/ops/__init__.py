"""What operators see: logs, metrics, readiness and checks before the start."""
