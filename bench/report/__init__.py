"""`aegis bench report` and `aegis bench timeline`: what runs have left behind, as one page and as a trace."""
