"""Latency and throughput of the service, the run folder and the dashboard."""
