"""The command line: one thin file per verb, which parses, calls one function and prints."""
