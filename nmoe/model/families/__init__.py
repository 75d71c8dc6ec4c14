"""One file per checkpoint family: its configuration and weight names, mapped to nmoe's."""
