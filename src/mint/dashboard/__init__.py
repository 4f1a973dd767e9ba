"""The dashboard: pages and JSON over run folders, and over the numbers of a service. Reads only; knows no engine."""
