"""The suite `overload`: how many tokens are on time where not all can be, beside the best of tuned rivals.

`bench.simulate` calls it.
"""
