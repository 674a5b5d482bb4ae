"""What a server tells of itself: spans, records, decisions, logs, reports and traces; metrics are in `metrics/`.

Every process writes it; the admin API, the commands and the reports of `bench` read it.
"""
