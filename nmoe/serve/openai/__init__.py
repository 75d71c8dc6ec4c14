"""OpenAI's routes over an engine of this process: `nmoe serve`."""
