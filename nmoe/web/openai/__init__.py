"""OpenAI's API as it is read: fields, messages and refusals."""
