"""Checkpoints whose weights come quantised: what their configuration says, and the weights that their tensors stand
for, read without the packages that made them."""
