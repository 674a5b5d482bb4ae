"""The keys of the server `keyed`, and their limits."""

ADMIN, ALICE, BOB, CAROL = "adm-s3cret", "sk-alice-s3cret", "sk-bob-s3cret", "sk-carol-s3cret"
UNLIMITED = {name: f"sk-{name}-s3cret" for name in ("emil", "fay", "gil")}
"""Keys by the names of their callers."""

ALLOWED, AT_ONCE, TOKENS = 12, 2, 500
"""Requests of Alice's in a minute, of Bob's at a time, tokens of Carol's in a minute."""
