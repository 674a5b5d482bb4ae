"""The figures of the papers, all of them: simulated anew, and held against what is known of them."""
