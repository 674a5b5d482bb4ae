"""Who calls which model when, and with how many tokens: generators, lengths and traces."""
