"""Tools: typed functions that a policy calls between its turns."""
