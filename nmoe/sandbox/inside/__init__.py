"""The code that runs between host and sandboxed code: plain Python on a bare interpreter, with only the standard library."""
