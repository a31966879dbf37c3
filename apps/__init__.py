"""What people use: command line, report and demonstration. Thin: parse, one library call, record, render."""
