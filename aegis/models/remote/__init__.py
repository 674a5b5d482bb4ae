"""Checkpoints that lie elsewhere: on a hub, behind a web server, in a bucket. They are listed, then fetched."""
