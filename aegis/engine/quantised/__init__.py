"""Linear layers whose weights are whole numbers of 8 or 4 bits with scales: what they mean, how they lie in a weight
image, and how they are multiplied."""
