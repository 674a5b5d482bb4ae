"""Metrics for Prometheus, a module for each subject.

The node and the proxies fill them in, and `/metrics` adds them up.
"""
