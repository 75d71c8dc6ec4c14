"""Text as token ids: the byte-level tokenizer and the Harmony conversation format."""
