"""Between the nodes of a Ray cluster: KV and weight images, as bytes with checksums, from memory to memory."""
