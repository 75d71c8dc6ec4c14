"""What runs between the host and the sandboxed code: plain Python on a bare interpreter, the standard library alone."""
