"""Two parties compute together, and neither sees the other's input: garbled circuits and oblivious transfer."""
