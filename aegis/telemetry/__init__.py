"""Data that a server reports about itself: spans, records, decisions, logs, reports, traces; `metrics/` has metrics.

Every process writes it; the admin API, the commands and the reports of `bench` read it.
"""
