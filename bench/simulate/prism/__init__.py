"""Prism's evaluation (§7): who shares devices how, by first tokens in time and the pace of those that follow."""
