"""What a thief's server does with the questions that reach it: one method, one file."""
