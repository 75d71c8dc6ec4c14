"""Text as token ids: the byte-level tokenizer, the Harmony format, chat templates, and one renderer for each format."""
