"""Parts of the catalogue: a model as it has it, and images that are made again."""
