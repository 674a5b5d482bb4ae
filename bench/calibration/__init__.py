"""From what a server did to what its steps, copies and messages cost."""
